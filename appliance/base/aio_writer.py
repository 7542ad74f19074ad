"""Writes that the kernel makes by itself: no thread waits for the disk, and none takes the interpreter's lock afterwards.

    write ─► io_submit(2) ─► the disk ─► eventfd(2) ─► a callback of the event loop

A thread that writes takes the lock twice per write, each time up to a switch interval after it could have gone on, and the
event loop stands still while it holds it. Here the event loop only submits the write and is called back at its end.

Method: Linux's asynchronous I/O, whose writes return at once for files opened with O_DIRECT; with O_DSYNC they complete when
the bytes are durable. That holds for overwriting, so no file grows here. A write is of whole blocks: what precedes `data` in
its first block is written again. The memory may be freed meanwhile, as the kernel holds on to it, and a process that dies
leaves no write behind: the kernel waits for it before the process is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

BLOCK_BYTES = 4096
ROOM_BYTES = 256 * 1024
SLOW_SUBMIT_S = 0.001
"""A file system that takes this long to accept a write does not write asynchronously: the event loop would stand still."""
SLOW_SUBMITS_MAX = 8
"""How many in a row: a single one may be due to the machine."""

_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # of asm/unistd.h: libc has no names for them
_PWRITE, _TELL_EVENTFD = 1, 1  # IOCB_CMD_PWRITE, IOCB_FLAG_RESFD


class _Request(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, as little-endian machines have it."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("file", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("eventfd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """struct io_event: how a request ended."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class AioWriter:
    """One write at a time, to one of several files, each from its beginning on. Belongs to the running event loop.

    Raises OSError where the system, the sandbox or the file system does not offer it.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if sys.platform != "linux" or platform.machine() not in _CALLS or sys.maxsize < 2**32:
            raise OSError(errno.ENOSYS, "asynchronous writes are known for 64-bit Linux on x86-64 and ARM alone")
        self._calls = _CALLS[platform.machine()]
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall  # which keeps the interpreter's lock: all calls are short
        self._syscall.restype = ctypes.c_long
        self._loop = asyncio.get_running_loop()
        self._room = mmap.mmap(-1, ROOM_BYTES)  # pages of its own: a write must begin at a block of memory, too
        with ExitStack() as made:
            flags = os.O_RDWR | os.O_DIRECT | os.O_DSYNC
            self._files = [_opened(made, os.open(path, flags)) for path in paths]
            self._tails = [b""] * len(paths)  # what stands in the block that each file ends in
            self._ends = [0] * len(paths)
            self._eventfd = _opened(made, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._context = ctypes.c_ulong(0)
            self._call(_SETUP, 1, ctypes.byref(self._context))
            made.callback(self._call, _DESTROY, self._context)
            self._loop.add_reader(self._eventfd, self._take_completion)
            made.callback(self._loop.remove_reader, self._eventfd)
            self._made = made.pop_all()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._request = _Request(opcode=_PWRITE, flags=_TELL_EVENTFD, eventfd=self._eventfd, buffer=self._address)
        self._requests = (ctypes.POINTER(_Request) * 1)(ctypes.pointer(self._request))
        self._on_end: Callable[[bool], None] | None = None
        self._num_slow = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a write is in flight."""
        return self._on_end is not None

    @property
    def is_slow(self) -> bool:
        """Return whether writes are not asynchronous here after all."""
        return self._num_slow >= SLOW_SUBMITS_MAX

    def fits(self, num_bytes: int) -> bool:
        """Return whether one write may have so many bytes."""
        return num_bytes <= ROOM_BYTES - BLOCK_BYTES

    def write(self, index: int, data: bytes, offset: int, on_end: Callable[[bool], None]) -> None:
        """Begin to write `data` to a file, after what was written there before or at its beginning.

        The event loop calls `on_end` with whether all of it is durable. Raises OSError; then `on_end` is not called.
        """
        if offset not in (0, self._ends[index]):
            raise OSError(errno.ESPIPE, "writes follow one another")
        if self.is_busy:
            raise OSError(errno.EBUSY, "a write is on its way")
        before = self._tails[index] if offset else b""
        whole = before + data
        num_bytes = -(-len(whole) // BLOCK_BYTES) * BLOCK_BYTES
        if offset - len(before) + num_bytes > os.fstat(self._files[index]).st_size:
            raise OSError(errno.EFBIG, "the file would grow, for which the event loop would wait")
        self._room[:num_bytes] = whole.ljust(num_bytes, b"\0")
        self._request.file, self._request.num_bytes, self._request.offset = self._files[index], num_bytes, offset - len(before)
        began_s = time.monotonic()
        self._call(_SUBMIT, self._context, 1, self._requests)
        self._num_slow = self._num_slow + 1 if time.monotonic() - began_s > SLOW_SUBMIT_S else 0
        self._on_end = on_end
        self._ends[index] = offset + len(data)
        self._tails[index] = whole[len(whole) // BLOCK_BYTES * BLOCK_BYTES :]

    def close(self) -> None:
        """Close the files. Not while a write is in flight: the kernel would make the event loop wait for its end."""
        with suppress(OSError, RuntimeError):  # a loop that is closed has no readers any more
            self._made.close()

    def _take_completion(self) -> None:
        """Report the end of the write, if it has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        ended = _Event()
        if self._call(_GETEVENTS, self._context, 0, 1, ctypes.byref(ended), 0) and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(ended.result == self._request.num_bytes)

    def _call(self, which: int, *arguments: object) -> int:
        words = [ctypes.c_long(given) if isinstance(given, int) else given for given in (self._calls[which], *arguments)]
        result = int(self._syscall(*words))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _opened(made: ExitStack, file: int) -> int:
    made.callback(os.close, file)
    return file
