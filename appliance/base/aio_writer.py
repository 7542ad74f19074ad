"""Durable writes through Linux's native asynchronous I/O: no thread waits for the disk or competes for the interpreter lock.

    write ─► io_submit(2) ─► disk ─► eventfd(2) ─► callback in the event loop

A writer thread acquires the interpreter lock twice per write, waits up to a switch interval each time, and blocks the event
loop while it holds the lock. Here the event loop only submits the write and receives a callback when it completes.

Submission does not block for files opened with O_DIRECT; with O_DSYNC a write completes once its bytes are durable. Both hold
only for overwriting, so files never grow here. Writes cover whole blocks: the bytes that precede `data` in its first block are
written again. The buffer may be freed during a write, because the kernel pins its pages. If the process dies, the kernel
finishes its writes before the process is gone.
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
BUFFER_BYTES = 256 * 1024
SLOW_SUBMIT_S = 0.001
"""If submitting a write takes this long, the file system is not asynchronous and would block the event loop."""
SLOW_SUBMITS_MAX = 8
"""Consecutive slow submissions before the writer gives up: a single one may have other causes."""

_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_SYSCALL_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # from asm/unistd.h: libc has no wrappers
_PWRITE, _SIGNAL_EVENTFD = 1, 1  # IOCB_CMD_PWRITE, IOCB_FLAG_RESFD


class _Request(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, in its little-endian layout."""

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
    """struct io_event: the result of a request."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class AioWriter:
    """Writes to several files, one write at a time, each file sequentially from its start. Bound to the running event loop.

    Raises OSError where the system, the sandbox or the file system does not support asynchronous writes.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if sys.platform != "linux" or platform.machine() not in _SYSCALL_NUMBERS or sys.maxsize < 2**32:
            raise OSError(errno.ENOSYS, "asynchronous writes are supported only on 64-bit Linux on x86-64 and ARM")
        self._syscall_numbers = _SYSCALL_NUMBERS[platform.machine()]
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall  # keeps the interpreter lock: all calls are short
        self._syscall.restype = ctypes.c_long
        self._loop = asyncio.get_running_loop()
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)  # page-aligned, as O_DIRECT requires
        with ExitStack() as resources:
            flags = os.O_RDWR | os.O_DIRECT | os.O_DSYNC
            self._files = [_register_file(resources, os.open(path, flags)) for path in paths]
            self._tails = [b""] * len(paths)  # the bytes in the last, partial block of each file
            self._ends = [0] * len(paths)
            self._eventfd = _register_file(resources, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._context = ctypes.c_ulong(0)
            self._call(_SETUP, 1, ctypes.byref(self._context))
            resources.callback(self._call, _DESTROY, self._context)
            self._loop.add_reader(self._eventfd, self._on_completion)
            resources.callback(self._loop.remove_reader, self._eventfd)
            self._resources = resources.pop_all()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._request = _Request(opcode=_PWRITE, flags=_SIGNAL_EVENTFD, eventfd=self._eventfd, buffer=self._address)
        self._requests = (ctypes.POINTER(_Request) * 1)(ctypes.pointer(self._request))
        self._on_end: Callable[[bool], None] | None = None
        self._num_slow_submits = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a write is in flight."""
        return self._on_end is not None

    @property
    def is_slow(self) -> bool:
        """Return whether submissions block, so that writes are not asynchronous after all."""
        return self._num_slow_submits >= SLOW_SUBMITS_MAX

    def fits(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` fit in one write."""
        return num_bytes <= BUFFER_BYTES - BLOCK_BYTES

    def write(self, index: int, data: bytes, offset: int, on_end: Callable[[bool], None]) -> None:
        """Start writing `data` to file `index`, at its start (offset 0) or directly after the previous write.

        The event loop calls `on_end(True)` once all bytes are durable, `on_end(False)` if the write failed. If this raises
        OSError, `on_end` is not called.
        """
        if offset not in (0, self._ends[index]):
            raise OSError(errno.ESPIPE, "writes must be sequential")
        if self.is_busy:
            raise OSError(errno.EBUSY, "a write is already in flight")
        prefix = self._tails[index] if offset else b""
        whole = prefix + data
        num_bytes = -(-len(whole) // BLOCK_BYTES) * BLOCK_BYTES
        if offset - len(prefix) + num_bytes > os.fstat(self._files[index]).st_size:
            raise OSError(errno.EFBIG, "the write would extend the file and block the event loop")
        self._buffer[:num_bytes] = whole.ljust(num_bytes, b"\0")
        self._request.file, self._request.num_bytes, self._request.offset = self._files[index], num_bytes, offset - len(prefix)
        started_s = time.monotonic()
        self._call(_SUBMIT, self._context, 1, self._requests)
        self._num_slow_submits = self._num_slow_submits + 1 if time.monotonic() - started_s > SLOW_SUBMIT_S else 0
        self._on_end = on_end
        self._ends[index] = offset + len(data)
        self._tails[index] = whole[len(whole) // BLOCK_BYTES * BLOCK_BYTES :]

    def close(self) -> None:
        """Close the files. Do not call while a write is in flight: the kernel would block the event loop until it completes."""
        with suppress(OSError, RuntimeError):  # a closed loop has no readers
            self._resources.close()

    def _on_completion(self) -> None:
        """Report the completion of the write, if it has completed."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        completion = _Event()
        if self._call(_GETEVENTS, self._context, 0, 1, ctypes.byref(completion), 0) and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(completion.result == self._request.num_bytes)

    def _call(self, call: int, *arguments: object) -> int:
        values = (self._syscall_numbers[call], *arguments)
        result = int(self._syscall(*(ctypes.c_long(value) if isinstance(value, int) else value for value in values)))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _register_file(resources: ExitStack, file: int) -> int:
    resources.callback(os.close, file)
    return file
