"""A write-ahead journal: a record is durable once `append` returns, before it is stored in its final place.

    append ─► group commit: one durable write for all waiting records ─► their callers continue
    release ─► the record is stored elsewhere; a file whose records are all released is reused

Two files alternate, so that neither grows without bound under constant load. Both are preallocated: overwriting costs one disk
write, while growing a file costs an additional file-system transaction.

A record is a line with a checksum and an increasing number: reading stops at the first line that is torn (half written by a
dying process) or has a lower number than the line before it. The journal does not interpret records.

Records are written by kernel AIO (`AioWriter`) if that is requested and available, else by a thread. After a failed AIO write
the thread takes over for good: it retries and reports the reason.
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
from appliance.base.awake_time import AwakeStopwatch, done_within
from appliance.base.data_folder import sync_folder

FILE_BYTES = 1 << 20
"""Length of each file, a multiple of the block size; records that do not fit go to the other file."""

RETRY_S = 1.0
"""Interval between retries after a failure, and between checks that the files are intact."""

STUCK_S = 5.0
"""A write that has not returned after this time counts as failed until it does."""

_log = structlog.get_logger()


class Journal:
    """Two files with one writer. Call `read_remaining` and `clear` before the first `append`, and `close` at the end.

    `use_aio` writes by kernel AIO where available. Raises OSError if the files cannot be created. The caller ensures that
    only one journal uses a path at a time. A file that is deleted or truncated meanwhile is recreated for later records.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, use_aio: bool = False) -> None:
        self._last_error: str | None = None
        self._writing_since_s: float | None = None  # of the thread
        self._aio_time = AwakeStopwatch()  # of a write by kernel AIO
        self._next_check_s = 0.0
        self._paths = _paths(path)
        file_bytes = -(-file_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._files = [_open(file, file_bytes) for file in self._paths]
        _sync_names(path)
        self._file_bytes = file_bytes
        self._current = 0
        self._ends = [0, 0]
        self._newest = [0, 0]  # number of the newest record in each file
        self._unreleased: dict[int, None] = {}  # numbers not released yet, oldest first
        self._oldest_unreleased = 1
        self._next_number = 1
        self._waiting: SimpleQueue[_Append | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._aio_queue: list[_Append] = []
        self._is_submit_scheduled = False
        self._use_aio = use_aio
        self._aio: AioWriter | None = None
        self._is_closed = False

    @property
    def last_error(self) -> str | None:
        """Return why the last write failed or that it hangs; None if the last write succeeded."""
        since_s = self._writing_since_s
        if self._aio_time.elapsed_s > STUCK_S or (since_s is not None and time.monotonic() - since_s > STUCK_S):
            return f"a write has not returned for {STUCK_S:g} s"
        return self._last_error

    def read_remaining(self) -> list[bytes]:
        """Return the records left by an earlier process, oldest first; some may already be stored elsewhere."""
        return _read(self._paths)

    def clear(self) -> None:
        """Discard the records left by an earlier process."""
        for index, file in enumerate(self._files):
            _write(file, bytes(os.fstat(file).st_size), 0)
            self._ends[index] = 0

    async def append(self, record: bytes, timeout_s: float | None = None) -> int:
        """Write `record`, which must not contain a line break, and return its number once it is durable.

        Raises OSError if it cannot be written, at the latest after `timeout_s`, or the journal is closed. After an error or
        cancellation the record need not be released; a later `read_remaining` may still return it.
        """
        if not record or b"\n" in record:
            raise ValueError("a record must be one non-empty line")
        if self._is_closed:
            raise OSError("the journal is closed")
        loop = asyncio.get_running_loop()
        if self._thread is None and self._aio is None:
            self._start(loop)
        number, self._next_number = self._next_number, self._next_number + 1
        waiting = _Append(number, _line(number, record), loop.create_future())
        self._unreleased[number] = None
        if self._aio is None:
            self._waiting.put(waiting)
        else:
            self._queue_for_aio(loop, waiting)
        try:
            if timeout_s is not None and not await done_within(waiting.done, timeout_s):
                raise TimeoutError(f"not written within {timeout_s:g} s")
            await waiting.done
        except BaseException:
            waiting.done.cancel()
            self.release([number])
            raise
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """Mark these records as durably stored elsewhere."""
        for number in numbers:
            self._unreleased.pop(number, None)
        self._oldest_unreleased = next(iter(self._unreleased), self._next_number)

    async def close(self) -> None:
        """Close after the last record is written. Clears the files if every record was released.

        Does not wait for a write that hangs: it ends with the process, and the next start finds its records.
        """
        if self._is_closed:
            return  # the descriptors may belong to other files by now
        self._is_closed = True
        if await self._close_aio():
            await asyncio.to_thread(self._close_files)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the AIO writer, or else the writer thread."""
        if self._use_aio:
            self._use_aio = False  # try only once
            try:
                self._aio = AioWriter(self._paths)
            except OSError as error:
                _log.info("journal is written by a thread", reason=str(error))
            else:
                return
        thread = Thread(target=self._write_forever, args=(loop,), name="journal", daemon=True)
        thread.start()
        self._thread = thread

    def _queue_for_aio(self, loop: asyncio.AbstractEventLoop, append: _Append) -> None:
        """Queue `append`, to be written together with all others of this event-loop iteration."""
        self._aio_queue.append(append)
        if not self._is_submit_scheduled and self._aio is not None and not self._aio.is_busy:
            self._is_submit_scheduled = True
            loop.call_soon(self._submit_aio)

    def _submit_aio(self) -> None:
        """Submit the queue to the kernel. If that fails, the thread writes it and everything after it."""
        self._is_submit_scheduled = False
        aio, batch = self._aio, self._aio_queue
        if aio is None or aio.is_busy or not batch:
            return
        self._aio_queue = []
        lines = b"".join([append.line for append in batch])
        try:
            if time.monotonic() >= self._next_check_s:
                self._check_files()
            if aio.is_slow or not aio.fits(len(lines)):
                raise OSError(f"{len(batch)} records exceed the write buffer, or submitting writes is slow")
            index, end = self._choose_target(len(lines))
            aio.write(index, lines, end, lambda is_durable: self._on_aio_done(batch, len(lines), is_durable))
            self._aio_time.start()
        except Exception as error:  # noqa: BLE001 - otherwise the callers would wait for ever
            if not isinstance(error, OSError):
                _log.exception("journal write by kernel AIO failed")
            self._switch_to_thread(batch, _reason(error))

    def _on_aio_done(self, batch: list[_Append], num_bytes: int, is_durable: bool) -> None:
        self._aio_time.stop()
        if not is_durable:
            self._switch_to_thread(batch, "an asynchronous write failed")
            return
        self._record_written(batch, num_bytes)
        _resolve(batch, None)
        self._submit_aio()

    def _switch_to_thread(self, batch: list[_Append], reason: str) -> None:
        """Switch to the writer thread for good, `batch` first."""
        _log.warning("journal is written by a thread from now on", reason=reason)
        self._next_check_s = 0.0  # check the files: they may be the cause
        aio, self._aio = self._aio, None
        waiting, self._aio_queue = [*batch, *self._aio_queue], []
        if aio is not None:
            aio.close()
        try:
            self._start(asyncio.get_running_loop())
        except RuntimeError as error:  # no thread could be started; the next `append` tries again
            _resolve(waiting, OSError(str(error)))
            return
        for append in waiting:
            self._waiting.put(append)

    async def _close_aio(self) -> bool:
        """Wait for AIO writes in flight and close the AIO writer. Returns False if a write hangs."""
        deadline_s = time.monotonic() + STUCK_S
        while self._aio is not None and (self._aio.is_busy or self._aio_queue):
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(0.001)
        if self._aio is not None:
            self._aio.close()
            self._aio = None
        return True

    def _close_files(self) -> None:
        """Stop the thread, if there is one, and close the files."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(STUCK_S)
            if self._thread.is_alive():
                return
        if self._next_number > 1 and not self._unreleased:
            with suppress(OSError):  # the next start then finds records that are already stored elsewhere
                self.clear()
        for file in self._files:
            with suppress(OSError):  # everything is written already
                os.close(file)

    def _write_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        is_last = False
        while not is_last:
            batch, is_last = self._take()
            error: OSError | None = None
            self._writing_since_s = time.monotonic()
            try:
                self._write(batch)
            except OSError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - if the thread died, callers would wait for ever without an error
                error = OSError(_reason(raised))
                if self._last_error != _reason(error):  # log once, not at every retry
                    _log.exception("journal write failed")
            self._last_error = None if error is None else _reason(error)
            self._writing_since_s = None
            with suppress(RuntimeError):  # the loop is closed: no callers are waiting
                loop.call_soon_threadsafe(_resolve, batch, error)

    def _take(self) -> tuple[list[_Append], bool]:
        """Wait for records and return them, with whether they are the last. Returns no records when a retry is due."""
        batch: list[_Append] = []
        with suppress(Empty):
            append = self._waiting.get(timeout=None if self._last_error is None else RETRY_S)
            while append is not None:
                batch.append(append)
                append = self._waiting.get_nowait()
            return batch, True
        return batch, False

    def _write(self, batch: list[_Append]) -> None:
        """Write `batch` durably. Remains of a failed write are overwritten by the next one."""
        if time.monotonic() >= self._next_check_s:
            self._recreate_damaged_files()
        lines = b"".join([append.line for append in batch])
        index, end = self._choose_target(len(lines))
        _write(self._files[index], lines or b"\n", end)
        if batch:
            self._record_written(batch, len(lines))

    def _choose_target(self, num_bytes: int) -> tuple[int, int]:
        """Return the file and offset to write to. A file grows only while the other has unreleased records."""
        other = 1 - self._current
        if self._ends[self._current] + num_bytes > self._file_bytes and self._newest[other] < self._oldest_unreleased:
            self._current, self._ends[other] = other, 0
        return self._current, self._ends[self._current]

    def _record_written(self, batch: list[_Append], num_bytes: int) -> None:
        self._ends[self._current] += num_bytes
        self._newest[self._current] = batch[-1].number

    def _is_intact(self, index: int) -> bool:
        """Return whether a file still exists and has its full length."""
        status = os.fstat(self._files[index])
        return status.st_nlink > 0 and status.st_size >= max(self._file_bytes, self._ends[index])

    def _check_files(self) -> None:
        """Raise OSError if a file was deleted or truncated."""
        if not all(map(self._is_intact, range(len(self._files)))):
            raise OSError("a journal file was deleted or truncated")
        self._next_check_s = time.monotonic() + RETRY_S

    def _recreate_damaged_files(self) -> None:
        """Recreate a file that was deleted or truncated: records written to it would not be found."""
        for index, path in enumerate(self._paths):
            if self._is_intact(index):
                continue
            broken, self._files[index] = self._files[index], _open(path, self._file_bytes)
            self._ends[index] = 0
            os.close(broken)
            _sync_names(path)
        self._next_check_s = time.monotonic() + RETRY_S


class _Append:
    """A record being written, and the future that its caller awaits."""

    __slots__ = ("done", "line", "number")

    def __init__(self, number: int, line: bytes, done: asyncio.Future[None]) -> None:
        self.number, self.line, self.done = number, line, done


def remaining_records(path: Path) -> list[bytes]:
    """Like `Journal.read_remaining`, without creating files. Raises OSError."""
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
    """Write all of `data`: one pwrite may be partial."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _records(text: bytes) -> Iterable[tuple[int, bytes]]:
    """Yield the numbered records of a file, up to the first line that is invalid or has a lower number than its predecessor."""
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
    """Open a file for durable writes (O_DSYNC), preallocated to at least `size` bytes."""
    with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.write(bytes(max(0, size - length)))
        file.flush()
        os.fsync(file.fileno())
    return os.open(path, os.O_RDWR | os.O_DSYNC)


def _sync_names(path: Path) -> None:
    """Make the directory entries of new files durable, where the file system and permissions allow it."""
    with suppress(OSError):
        sync_folder(path.parent)
