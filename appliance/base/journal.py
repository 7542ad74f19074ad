"""A journal: a record is durable once `append` returns, long before it is written where it belongs.

    append ─► one write that waits for the disk, for all records that wait ─► their callers go on
    release ─► the record is stored elsewhere now; a file whose records were all released is used again

Two files are used in turn, so that neither grows without end under constant load. Both have their full length from the start:
overwriting costs the disk one write, growing also costs the file system a transaction of its own.

A record is a line with a checksum and a number, and numbers only rise: reading ends at the first line that a dying process left
half written, or that is older than the one before it. Knows no record's meaning.

The kernel writes by itself where that is requested and possible (`AioWriter`), else a thread does. Failures are left to the
thread: it takes over for good what the kernel did not write, tries again and reports why.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import structlog

from appliance.base.aio_writer import BLOCK_BYTES, AioWriter
from appliance.base.data_folder import sync_folder

FILE_BYTES = 1 << 20
"""The length of a file, in whole blocks; records that no longer fit go to the other one."""

RETRY_S = 1.0
"""How soon after a failure the journal tries to write again by itself, and how often it checks that its files are whole."""

STUCK_S = 5.0
"""A write that has not returned for this long counts as failed until it does."""

_log = structlog.get_logger()


class Journal:
    """Two files, written by one writer. Call `read_left` and `clear` before the first `append`, and `close` at the end.

    With `by_kernel` the kernel writes if it can. Raises OSError when the files cannot be made. The caller ensures that a path
    has one journal at a time. A file that is deleted or cut short meanwhile is made anew, for later records.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, by_kernel: bool = False) -> None:
        self._last_error: str | None = None
        self._writing_since_s: float | None = None
        self._look_again_s = 0.0
        self._paths = _paths(path)
        file_bytes = -(-file_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._files = [_open(file, file_bytes) for file in self._paths]
        _sync_names(path)
        self._file_bytes = file_bytes
        self._current = 0
        self._ends = [0, 0]
        self._newest = [0, 0]  # number of the last record in each file
        self._held: dict[int, None] = {}  # numbers that were not released, oldest first
        self._oldest_held = 1
        self._next_number = 1
        self._waiting: SimpleQueue[_Append | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._for_kernel: list[_Append] = []  # what waits for the kernel
        self._is_planned = False
        self._by_kernel = by_kernel
        self._kernel: AioWriter | None = None
        self._is_closed = False

    @property
    def last_error(self) -> str | None:
        """Return why the last write failed, or that it does not return; None when all is well."""
        since_s = self._writing_since_s
        if since_s is not None and time.monotonic() - since_s > STUCK_S:
            return f"a write has not returned for {STUCK_S:g} s"
        return self._last_error

    def read_left(self) -> list[bytes]:
        """Return the records that an earlier process left, oldest first; some may be stored elsewhere already."""
        return _read(self._paths)

    def clear(self) -> None:
        """Forget what was left."""
        for index, file in enumerate(self._files):
            _write(file, bytes(os.fstat(file).st_size), 0)
            self._ends[index] = 0

    async def append(self, record: bytes) -> int:
        """Return the number of `record`, which has no line break, once it is durable. Raises OSError when it cannot be, also
        once the journal is being closed.

        After a cancellation or an error it need not be released: at worst a later `read_left` finds it.
        """
        if not record or b"\n" in record:
            raise ValueError("a record is one line that is not empty")
        if self._is_closed:
            raise OSError("the journal is closed")
        loop = asyncio.get_running_loop()
        if self._thread is None and self._kernel is None:
            self._start(loop)
        number, self._next_number = self._next_number, self._next_number + 1
        waiting = _Append(number, _line(number, record), loop.create_future())
        self._held[number] = None
        if self._kernel is None:
            self._waiting.put(waiting)
        else:
            self._plan(loop, waiting)
        try:
            await waiting.done
        except BaseException:
            self.release([number])
            raise
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """Mark these records as stored elsewhere, durably."""
        for number in numbers:
            self._held.pop(number, None)
        self._oldest_held = next(iter(self._held), self._next_number)

    async def close(self) -> None:
        """End after the last record. The files are cleared when every record was released.

        A write that does not return is not waited for: it ends with the process, and a start finds its records.
        """
        if self._is_closed:
            return  # the numbers of its files may be those of others by now
        self._is_closed = True
        if await self._kernel_ends():
            await asyncio.to_thread(self._end)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to write, by the kernel or else in a thread."""
        if self._by_kernel:
            self._by_kernel = False  # it is tried once
            try:
                self._kernel = AioWriter(self._paths)
            except OSError as error:
                _log.info("the journal is written by a thread", reason=str(error))
            else:
                return
        thread = Thread(target=self._write_forever, args=(loop,), name="journal", daemon=True)
        thread.start()
        self._thread = thread

    def _plan(self, loop: asyncio.AbstractEventLoop, append: _Append) -> None:
        """Have the kernel write `append` with all that comes in the same turn of the event loop."""
        self._for_kernel.append(append)
        if not self._is_planned and self._kernel is not None and not self._kernel.is_busy:
            self._is_planned = True
            loop.call_soon(self._hand_to_kernel)

    def _hand_to_kernel(self) -> None:
        """Have the kernel write what waits. What it does not accept goes to the thread, as does all that comes later."""
        self._is_planned = False
        kernel, batch = self._kernel, self._for_kernel
        if kernel is None or kernel.is_busy or not batch:
            return
        self._for_kernel = []
        lines = b"".join([append.line for append in batch])
        try:
            if time.monotonic() >= self._look_again_s:
                self._check_files()
            if kernel.is_slow or not kernel.fits(len(lines)):
                raise OSError(f"{len(batch)} records are too much, or writes are slow")
            index, end = self._place(len(lines))
            kernel.write(index, lines, end, lambda is_durable: self._on_written(batch, len(lines), is_durable))
            self._writing_since_s = time.monotonic()
        except Exception as error:  # noqa: BLE001 - whoever waits would do so for ever
            if not isinstance(error, OSError):
                _log.exception("the journal could not be written by the kernel")
            self._leave_to_thread(batch, _reason(error))

    def _on_written(self, batch: list[_Append], num_bytes: int, is_durable: bool) -> None:
        self._writing_since_s = None
        if not is_durable:
            self._leave_to_thread(batch, "a write of the kernel failed")
            return
        self._note_written(batch, num_bytes)
        _resolve(batch, None)
        self._hand_to_kernel()

    def _leave_to_thread(self, batch: list[_Append], reason: str) -> None:
        """Write in a thread from now on, `batch` first."""
        _log.warning("the journal is written by a thread from now on", reason=reason)
        self._look_again_s = 0.0  # it may be the files
        kernel, self._kernel = self._kernel, None
        waiting, self._for_kernel = [*batch, *self._for_kernel], []
        if kernel is not None:
            kernel.close()
        try:
            self._start(asyncio.get_running_loop())
        except RuntimeError as error:  # no thread can be started; the next `append` tries again
            _resolve(waiting, OSError(str(error)))
            return
        for append in waiting:
            self._waiting.put(append)

    async def _kernel_ends(self) -> bool:
        """Wait for the kernel's writes; return whether none is in flight any more, except in the thread."""
        until_s = time.monotonic() + STUCK_S
        while self._kernel is not None and (self._kernel.is_busy or self._for_kernel):
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.001)
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
        return True

    def _end(self) -> None:
        """End the thread, if there is one, and close the files."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(STUCK_S)
            if self._thread.is_alive():
                return
        if self._next_number > 1 and not self._held:
            with suppress(OSError):  # then a start finds records that are stored elsewhere
                self.clear()
        for file in self._files:
            with suppress(OSError):  # all was written already
                os.close(file)

    def _write_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            error: OSError | None = None
            self._writing_since_s = time.monotonic()
            try:
                self._write(batch)
            except OSError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - a thread that ended would let everybody wait, and say nothing
                error = OSError(_reason(raised))
                if self._last_error != _reason(error):  # once, and not at each further try
                    _log.exception("the journal could not be written")
            self._last_error = None if error is None else _reason(error)
            self._writing_since_s = None
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, batch, error)

    def _take(self) -> tuple[list[_Append], bool]:
        """Return what waits, as soon as something does, and whether it is the last; nothing when it is time to try again."""
        batch: list[_Append] = []
        with suppress(Empty):
            append = self._waiting.get(timeout=None if self._last_error is None else RETRY_S)
            while append is not None:
                batch.append(append)
                append = self._waiting.get_nowait()
            return batch, True
        return batch, False

    def _write(self, batch: list[_Append]) -> None:
        """Make the lines of `batch` durable. What a failure leaves of them is overwritten by the next."""
        if time.monotonic() >= self._look_again_s:
            self._keep_files_whole()
        lines = b"".join([append.line for append in batch])
        index, end = self._place(len(lines))
        _write(self._files[index], lines or b"\n", end)
        if batch:
            self._note_written(batch, len(lines))

    def _place(self, num_bytes: int) -> tuple[int, int]:
        """Return which file is written to next, and from where on. A file grows only while the other one is held."""
        other = 1 - self._current
        if self._ends[self._current] + num_bytes > self._file_bytes and self._newest[other] < self._oldest_held:
            self._current, self._ends[other] = other, 0
        return self._current, self._ends[self._current]

    def _note_written(self, batch: list[_Append], num_bytes: int) -> None:
        self._ends[self._current] += num_bytes
        self._newest[self._current] = batch[-1].number

    def _is_whole(self, index: int) -> bool:
        """Return whether a file is where it was made and as long as it must be."""
        status = os.fstat(self._files[index])
        return status.st_nlink > 0 and status.st_size >= max(self._file_bytes, self._ends[index])

    def _check_files(self) -> None:
        """Raise OSError when one of them was deleted or cut short."""
        if not all(map(self._is_whole, range(len(self._files)))):
            raise OSError("a file of the journal was deleted or cut short")
        self._look_again_s = time.monotonic() + RETRY_S

    def _keep_files_whole(self) -> None:
        """Make a file anew that was deleted or cut short: nobody would find what is written there."""
        for index, path in enumerate(self._paths):
            if self._is_whole(index):
                continue
            broken, self._files[index] = self._files[index], _open(path, self._file_bytes)
            self._ends[index] = 0
            os.close(broken)
            _sync_names(path)
        self._look_again_s = time.monotonic() + RETRY_S


class _Append:
    """A record in flight, and the future that its caller awaits."""

    __slots__ = ("done", "line", "number")

    def __init__(self, number: int, line: bytes, done: asyncio.Future[None]) -> None:
        self.number, self.line, self.done = number, line, done


def left_in(path: Path) -> list[bytes]:
    """Return what `read_left` would, and make no file. Raises OSError."""
    return _read([file for file in _paths(path) if file.exists()])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _resolve(batch: list[_Append], error: OSError | None) -> None:
    for append in batch:
        if append.done.done():
            continue
        if error is None:
            append.done.set_result(None)
        else:
            append.done.set_exception(error)


def _line(number: int, record: bytes) -> bytes:
    text = b"%d %b" % (number, record)
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _paths(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}-{number}") for number in (1, 2)]


def _read(paths: Iterable[Path]) -> list[bytes]:
    """Return the records of these files, oldest first."""
    numbered = [found for path in paths for found in _records(path.read_bytes())]
    return [record for _number, record in sorted(numbered)]


def _write(file: int, data: bytes, offset: int) -> None:
    """Write all of `data`: one call may write a part."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _records(text: bytes) -> Iterable[tuple[int, bytes]]:
    """Yield the records of a file with their numbers, up to the first line that is none or is older than the one before it."""
    newest = 0
    for line in text.split(b"\n"):
        checksum, _, rest = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(rest):
            return
        number, _, record = rest.partition(b" ")
        if int(number) <= newest:
            return
        newest = int(number)
        yield newest, record


def _open(path: Path, size: int) -> int:
    """Open a file whose writes wait for the disk, at least `size` long."""
    with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.write(bytes(max(0, size - length)))
        file.flush()
        os.fsync(file.fileno())
    return os.open(path, os.O_RDWR | os.O_DSYNC)


def _sync_names(path: Path) -> None:
    """Make the names of new files durable, where the file system can do that and the folder may be read."""
    with suppress(OSError):
        sync_folder(path.parent)
