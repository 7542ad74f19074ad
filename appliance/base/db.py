"""One database for the appliance, SQLite or PostgreSQL: read-only connections, one-transaction writers.

Nobody else opens connections. SQLAlchemy's own transaction handling for SQLite is switched off, so that a writer begins with
BEGIN IMMEDIATE: a deferred transaction that reads first and writes later is refused at once when another one wrote between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Insert, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from appliance.base.database_encoding import server_url
from appliance.base.sqlite_thread import SqliteThread

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["sqlite", "postgresql"]

SQLITE_SYNCHRONOUS = "FULL"  # a COMMIT has reached the disk when it returns
BUSY_TIMEOUT_MS = 5000
READERS_MAX = 8
WRITERS_MAX = 6  # on PostgreSQL; SQLite has one
BATCH_WRITERS_MAX = 2  # apart from the others, so that long reads and changes hold up no request
BATCH_STATEMENTS = 512  # kept compiled: those of `prepared` come in as many forms as they may have rows
CHECKOUT_TIMEOUT_S = 10.0
_AFTER_COMMIT = "after_commit"


class Database:
    """Connections to one database. `reading` sees one snapshot; `writing` is one transaction, and on SQLite the only one."""

    def __init__(
        self, kind: Kind, writers: AsyncEngine, readers: AsyncEngine, batch_writer: SqliteThread | AsyncEngine
    ) -> None:
        self.kind: Kind = kind
        self.principals = ChangeCount()
        self.webhooks = ChangeCount()
        self.outbox_written = asyncio.Event()
        self.catch_up: Callable[[], Awaitable[None]] | None = None
        """Waits until what is durable elsewhere (the ledger's journal) is in the tables. `reading` and `writing` call it."""
        self._writers = writers
        self._readers = readers
        self._batch_writer = batch_writer
        self._writer_lock = asyncio.Lock()

    @classmethod
    def open(cls, url: str) -> Database:
        """Return the database at `url` without connecting yet, which `async with` closes.

        Raises ValueError when it is not a URL that we serve.
        """
        kind, target = parse_url(url)
        if kind == "sqlite":
            return cls(kind, _sqlite_writer(target), _sqlite_readers(target), SqliteThread(_sqlite_batch_writer(target)))
        server, sizes = server_url(target), (WRITERS_MAX, READERS_MAX, BATCH_WRITERS_MAX)
        writers, readers, batch_writers = (_engine(server, size, pool_pre_ping=True) for size in sizes)
        return cls(kind, writers, readers, batch_writers)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection that sees one snapshot and cannot write."""
        if self.catch_up is not None:
            await self.catch_up()
        async with self._readers.connect() as connection:
            if self.kind == "postgresql":
                await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection inside one transaction: committed when the block ends, rolled back when it raises.

        An error of COMMIT is raised to the caller: leaving the block without one means that the rows are durable.
        """
        if self.catch_up is not None:
            await self.catch_up()
        async with self._transaction() as connection:
            connection.info.pop(_AFTER_COMMIT, None)  # of a transaction before this one that was rolled back
            yield connection
            calls: list[_Call] = connection.info.pop(_AFTER_COMMIT, [])
        for call in calls:
            call(self)

    @asynccontextmanager
    async def changing_principals(self) -> AsyncIterator[AsyncConnection]:
        """Open the transaction of `writing` for a change of who may do what, and count it in `principals`.

        It counts however the block is left: a COMMIT that was cancelled, or whose answer was lost, may have happened.
        """
        try:
            async with self.writing() as connection:
                yield connection
        finally:
            self.principals.bump()

    async def batch_write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn(connection, …)` returns, which makes a whole transaction.

        For many statements at once, many times a second: on SQLite it costs one turn of the event loop, however many they are,
        and `fn` runs in a thread, where cancelling the caller does not stop it.
        """
        if isinstance(self._batch_writer, AsyncEngine):
            async with self._batch_writer.begin() as connection:
                result, calls = await connection.run_sync(_with_calls, fn, *args, **options)
        else:
            async with self._writer_lock:
                result, calls = await self._batch_writer.write(_with_calls, fn, *args, **options)
        for call in calls:
            call(self)
        return result

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        if self.kind == "postgresql":
            async with self._writers.begin() as connection:
                yield connection
            return
        async with self._writer_lock, self._writers.begin() as connection:
            yield connection

    async def ping(self) -> None:
        """Raise the driver's error when the database cannot be written."""
        await self.batch_write(_write_nothing)

    async def close(self) -> None:
        """Close every connection."""
        await (self._batch_writer.dispose() if isinstance(self._batch_writer, AsyncEngine) else self._batch_writer.close())
        await self._readers.dispose()
        await self._writers.dispose()

    def checked_out(self) -> int:
        """Return how many connections are in use now."""
        engines = [each for each in (self._readers, self._writers, self._batch_writer) if isinstance(each, AsyncEngine)]
        pools: list[Any] = [engine.pool for engine in engines]
        return sum(pool.checkedout() for pool in pools)


def _with_calls(
    connection: Connection, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **options: P.kwargs
) -> tuple[T, list[_Call]]:
    """Return what `fn(connection, …)` returns, and the calls to make after the commit."""
    connection.info.pop(_AFTER_COMMIT, None)
    result = fn(connection, *args, **options)
    return result, connection.info.pop(_AFTER_COMMIT, [])


def after_commit(connection: AsyncConnection | Connection, call: _Call) -> None:
    """Call `call` once the transaction of `connection` is durable, and never when it was rolled back. It must not raise."""
    connection.info.setdefault(_AFTER_COMMIT, []).append(call)


def _write_nothing(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        # Writes the header page with the value it has: a full disk or a read-only file shows at COMMIT.
        version = connection.execute(text("PRAGMA user_version")).scalar_one()
        connection.execute(text(f"PRAGMA user_version = {int(version)}"))
    elif connection.execute(text("SHOW transaction_read_only")).scalar_one() != "off":
        raise OSError("the database accepts no writes")


_Call = Callable[[Database], object]


class ChangeCount:
    """Counts changes of rows that this process caches, and attempts that may have been one; a cache whose count is older reads
    again."""

    def __init__(self) -> None:
        self.value = 0
        self.listeners: list[Callable[[], None]] = []

    def bump(self) -> None:
        """Count a possible change of rows. Called after COMMIT and before the caller learns of it."""
        self.value += 1
        for listener in self.listeners:
            listener()


def insert_for(kind: str, table: Table) -> Any:
    """Return the INSERT of one kind of database, which has ON CONFLICT; its methods are the same for both."""
    return (sqlite if kind == "sqlite" else postgresql).insert(table)


def upsert_for(kind: str, table: Table, keys: Sequence[str], columns: Sequence[str]) -> Insert:
    """Return the INSERT that changes `columns` of a row that has the same `keys`, where there is one already."""
    statement = insert_for(kind, table)
    made: Insert = statement.on_conflict_do_update(
        index_elements=keys, set_={name: statement.excluded[name] for name in columns}
    )
    return made


def parse_url(url: str) -> tuple[Kind, URL]:
    """Return which kind of database `url` names, and its parts. Raises ValueError when it is not one that we serve."""
    target = make_url("postgresql://" + url.removeprefix("postgres://") if url.startswith("postgres://") else url)
    if target.drivername == "sqlite":
        if not target.database or target.database == ":memory:":
            raise ValueError("a SQLite database needs a file: sqlite:///PATH")
        return "sqlite", target
    if target.drivername == "postgresql":
        return "postgresql", target
    raise ValueError("the database must be sqlite:///PATH or postgresql://…")


def _engine(target: URL, connections_max: int, **options: bool) -> AsyncEngine:
    return create_async_engine(
        target,
        pool_size=connections_max,
        max_overflow=0,
        pool_timeout=CHECKOUT_TIMEOUT_S,
        hide_parameters=True,  # an error goes to the log, and among them are hashes of passwords
        **options,
    )


def _sqlite_writer(target: URL) -> AsyncEngine:
    engine = _engine(target.set(drivername="sqlite+aiosqlite"), 1)
    prepare_sqlite(engine.sync_engine, begin="BEGIN IMMEDIATE")
    return engine


def _sqlite_batch_writer(target: URL) -> Engine:
    options = {"check_same_thread": False, "cached_statements": BATCH_STATEMENTS}
    engine = create_engine(target, poolclass=NullPool, connect_args=options)
    prepare_sqlite(engine, begin="BEGIN IMMEDIATE")
    return engine


def _sqlite_readers(target: URL) -> AsyncEngine:
    engine = _engine(target.set(drivername="sqlite+aiosqlite"), READERS_MAX)
    prepare_sqlite(engine.sync_engine, begin="BEGIN", query_only=True)
    return engine


def prepare_sqlite(engine: Engine, *, begin: str, query_only: bool = False, foreign_keys: bool = True) -> None:
    """Make every connection of `engine` durable and strict, and begin its transactions with the statement `begin`."""
    pragmas = [f"busy_timeout={BUSY_TIMEOUT_MS}", f"foreign_keys={'ON' if foreign_keys else 'OFF'}"]
    pragmas += [f"synchronous={SQLITE_SYNCHRONOUS}"]
    pragmas += ["query_only=ON"] if query_only else ["journal_mode=WAL"]

    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # no BEGIN from the driver: `send_begin` sends ours
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def send_begin(connection: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(begin)
        cursor.close()

    event.listen(engine, "connect", on_connect)
    # Not a listener of "begin": when one raises, its connection takes itself to be beginning ever after, and sends no BEGIN.
    engine.dialect.do_begin = send_begin  # type: ignore[method-assign, assignment]


def reason_of(error: BaseException) -> str:
    """Return why the database, or the way to it, refused: the first line of what its driver says, or else the error's name."""
    cause = getattr(error, "orig", None) or error
    said = str(cause).strip().splitlines()
    return said[0] if said else type(cause).__name__
