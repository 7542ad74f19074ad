"""The appliance's database, SQLite or PostgreSQL: read-only connections, and writers of one transaction each.

All connections are opened here. The SQLite driver's implicit transactions are disabled, so that a writer begins with BEGIN
IMMEDIATE: a deferred transaction that reads before it writes fails at once if another one wrote in between.
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

from appliance.base.change_count import ChangeCount
from appliance.base.database_encoding import server_url
from appliance.base.sqlite_thread import SqliteThread

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["sqlite", "postgresql"]

SQLITE_SYNCHRONOUS = "FULL"  # COMMIT returns once the data is on disk
BUSY_TIMEOUT_MS = 5000
READERS_MAX = 8
WRITERS_MAX = 6  # on PostgreSQL; SQLite has one
BATCH_WRITERS_MAX = 2  # a pool of their own, so that long reads and changes block no request
POSTGRESQL_CONNECTIONS_MAX = READERS_MAX + WRITERS_MAX + BATCH_WRITERS_MAX + 1  # one holds the claim
BATCH_STATEMENTS = 512  # statement cache size: `prepared` uses one statement per number of rows
CHECKOUT_TIMEOUT_S = 10.0
KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "2",
    "tcp_user_timeout": "9000",  # ms: no keepalives are sent while data is unacknowledged
}
"""Parameters of a PostgreSQL connection that fails some ten seconds after the network stops carrying it. A read that many
requests share would otherwise not end for minutes."""
_AFTER_COMMIT = "after_commit"


class Database:
    """Connections to one database. `reading` sees one snapshot; `writing` is one transaction, serialised on SQLite."""

    def __init__(
        self, kind: Kind, writers: AsyncEngine, readers: AsyncEngine, batch_writer: SqliteThread | AsyncEngine
    ) -> None:
        self.kind: Kind = kind
        self.principal_changes = ChangeCount()
        self.webhook_changes = ChangeCount()
        self.outbox_written = asyncio.Event()
        self.catch_up: Callable[[], Awaitable[None]] | None = None
        """Waits until everything durable in the ledger's journal is in the tables too. Called by `reading` and `writing`."""
        self._writers = writers
        self._readers = readers
        self._batch_writer = batch_writer
        self._writer_lock = asyncio.Lock()

    @classmethod
    def open(cls, url: str) -> Database:
        """Return the database at `url` without connecting. Close it with `async with` or `close`.

        Raises ValueError for an unsupported URL.
        """
        kind, target = parse_url(url)
        if kind == "sqlite":
            return cls(kind, _sqlite_writer(target), _sqlite_readers(target), SqliteThread(_sqlite_batch_writer(target)))
        server, sizes = (
            server_url(target.set(query={**KEEPALIVE, **target.query})),
            (WRITERS_MAX, READERS_MAX, BATCH_WRITERS_MAX),
        )
        writers, readers, batch_writers = (_engine(server, size, pool_pre_ping=True) for size in sizes)
        event.listen(batch_writers.sync_engine, "connect", _prefer_indexes)
        return cls(kind, writers, readers, batch_writers)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Yield a read-only connection that sees one snapshot."""
        if self.catch_up is not None:
            await self.catch_up()
        async with self._readers.connect() as connection:
            if self.kind == "postgresql":
                await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection inside one transaction: committed when the block ends, rolled back when it raises.

        An error of COMMIT propagates to the caller: if the block is left without one, the rows are durable.
        """
        if self.catch_up is not None:
            await self.catch_up()
        async with self._transaction() as connection:
            connection.info.pop(_AFTER_COMMIT, None)  # left by an earlier transaction that was rolled back
            yield connection
            calls: list[_Call] = connection.info.pop(_AFTER_COMMIT, [])
        for call in calls:
            call(self)

    @asynccontextmanager
    async def changing_principals(self, changed: str) -> AsyncIterator[AsyncConnection]:
        """Like `writing`, for changes to principals (tenants, keys, permissions): counts a change of `changed`, the id of a
        tenant or key or the name of a table that is cached as a whole, in `principal_changes` afterwards.

        It is counted even on failure: a COMMIT that was cancelled or lost its answer may have succeeded.
        """
        try:
            async with self.writing() as connection:
                yield connection
        finally:
            self.principal_changes.bump(changed)

    async def batch_write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run `fn(connection, …)` in one transaction and return its result.

        For many statements many times a second: on SQLite a call costs one event-loop iteration, whatever the number of
        statements, and `fn` runs in a thread, where cancelling the caller does not stop it.
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
        """Raise the driver's error if the database is not writable."""
        await self.batch_write(_write_nothing)

    async def close(self) -> None:
        """Close every connection."""
        await (self._batch_writer.dispose() if isinstance(self._batch_writer, AsyncEngine) else self._batch_writer.close())
        await self._readers.dispose()
        await self._writers.dispose()

    def checked_out(self) -> int:
        """Return the number of connections in use."""
        all_engines = (self._readers, self._writers, self._batch_writer)
        engines = [engine for engine in all_engines if isinstance(engine, AsyncEngine)]
        pools: list[Any] = [engine.pool for engine in engines]
        return sum(pool.checkedout() for pool in pools)


def _with_calls(
    connection: Connection, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **options: P.kwargs
) -> tuple[T, list[_Call]]:
    """Return the result of `fn(connection, …)` and the callbacks to run after the commit."""
    connection.info.pop(_AFTER_COMMIT, None)
    result = fn(connection, *args, **options)
    return result, connection.info.pop(_AFTER_COMMIT, [])


def after_commit(connection: AsyncConnection | Connection, call: _Call) -> None:
    """Run `call` once the transaction of `connection` is durable, and never if it is rolled back. `call` must not raise."""
    connection.info.setdefault(_AFTER_COMMIT, []).append(call)


def _write_nothing(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        # Rewrites the header page with its present value: a full disk or a read-only file fails at COMMIT.
        version = connection.execute(text("PRAGMA user_version")).scalar_one()
        connection.execute(text(f"PRAGMA user_version = {int(version)}"))
    elif connection.execute(text("SHOW transaction_read_only")).scalar_one() != "off":
        raise OSError("the database accepts no writes")


_Call = Callable[[Database], object]


def insert_for(kind: str, table: Table) -> Any:
    """Return the dialect's INSERT, which supports ON CONFLICT with the same methods in both dialects."""
    return (sqlite if kind == "sqlite" else postgresql).insert(table)


def upsert_for(kind: str, table: Table, keys: Sequence[str], columns: Sequence[str]) -> Insert:
    """Return an INSERT that updates `columns` if a row with the same `keys` exists."""
    statement = insert_for(kind, table)
    upsert: Insert = statement.on_conflict_do_update(
        index_elements=keys, set_={name: statement.excluded[name] for name in columns}
    )
    return upsert


def parse_url(url: str) -> tuple[Kind, URL]:
    """Return the kind of database that `url` names, and the parsed URL. Raises ValueError for an unsupported URL."""
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
        hide_parameters=True,  # errors are logged, and parameters include password hashes
        **options,
    )


def _prefer_indexes(connection: Any, _record: object) -> None:
    """Let PostgreSQL scan no table that has an index for the statement.

    Batch writers look rows up by key. The server keeps the plan of a prepared statement: made while a table is small, it would
    scan the whole table for each row, and go on while the table grows, until the next ANALYZE. Where there is no index, the
    cost of a scan is set so high that the server would compile the statement (JIT).
    """
    connection.cursor().execute("SET enable_seqscan = off; SET jit = off")
    connection.commit()


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
    """Set durable, strict pragmas on every connection of `engine`, and begin its transactions with the statement `begin`."""
    pragmas = [f"busy_timeout={BUSY_TIMEOUT_MS}", f"foreign_keys={'ON' if foreign_keys else 'OFF'}"]
    pragmas += [f"synchronous={SQLITE_SYNCHRONOUS}"]
    pragmas += ["query_only=ON"] if query_only else ["journal_mode=WAL"]

    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # no implicit BEGIN by the driver: `send_begin` sends ours
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def send_begin(connection: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(begin)
        cursor.close()

    event.listen(engine, "connect", on_connect)
    # Not a "begin" event listener: if one raises, SQLAlchemy considers the connection in a transaction from then on and sends
    # no BEGIN again.
    engine.dialect.do_begin = send_begin  # type: ignore[method-assign, assignment]


def reason_of(error: BaseException) -> str:
    """Return a one-line reason for a database or connection error: the driver's first line, else the exception's name."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
