"""Asynchronous kernel writes of the journal: correct bytes, and the fallback to a thread."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import platform
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.base import aio_writer, awake_time
from appliance.base import journal as journal_module
from appliance.base.aio_writer import BLOCK_BYTES, BUFFER_BYTES, SLOW_SUBMITS_MAX, AioWriter
from appliance.base.journal import Journal, remaining_records
from tests.support.polling import DEADLINE_S, poll_until


@pytest.fixture(autouse=True)
def _no_slow_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the fallback for slow disks, except in the tests of it."""
    monkeypatch.setattr(aio_writer, "SLOW_SUBMIT_S", 60.0)


async def write_and_wait(writer: AioWriter, index: int, data: bytes, offset: int) -> bool:
    ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    writer.write(index, data, offset, ended.set_result)
    assert writer.is_busy
    return await ended


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    created = [tmp_path / "one", tmp_path / "two"]
    for path in created:
        path.write_bytes(b"\xff" * 8 * BLOCK_BYTES)
    return created


@pytest.mark.parametrize("seed", range(10))
async def test_writes_of_any_length_are_appended_and_restart_at_offset_zero(paths: list[Path], seed: int) -> None:
    rng = random.Random(seed)
    writer = AioWriter(paths)
    expected = [b"", b""]
    for _ in range(60):
        index = rng.randrange(2)
        if len(expected[index]) > 6 * BLOCK_BYTES:
            expected[index] = b""
        data = rng.randbytes(rng.choice([1, 7, 400, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]))
        assert await write_and_wait(writer, index, data, len(expected[index]))
        expected[index] += data
        for path, content in zip(paths, expected, strict=True):
            assert path.read_bytes()[: len(content)] == content
    writer.close()


async def test_the_rest_of_the_last_block_is_filled_with_zeros(paths: list[Path]) -> None:
    writer = AioWriter(paths)
    await write_and_wait(writer, 0, b"short", 0)
    assert paths[0].read_bytes()[5:BLOCK_BYTES] == bytes(BLOCK_BYTES - 5)
    writer.close()


async def test_a_write_that_is_not_sequential_is_refused(paths: list[Path]) -> None:
    writer = AioWriter(paths)
    with pytest.raises(OSError, match="sequential"):
        writer.write(0, b"data", 17, print)
    assert not writer.is_busy
    writer.close()


async def test_a_write_that_would_extend_the_file_is_refused(paths: list[Path]) -> None:
    writer = AioWriter(paths)
    assert await write_and_wait(writer, 0, b"x" * (8 * BLOCK_BYTES - 3), 0)
    with pytest.raises(OSError, match="extend the file"):
        writer.write(0, b"four", 8 * BLOCK_BYTES - 3, print)
    os.truncate(paths[1], BLOCK_BYTES)
    with pytest.raises(OSError, match="extend the file"):
        writer.write(1, b"x" * (BLOCK_BYTES + 1), 0, print)
    assert not writer.is_busy
    writer.close()


async def test_a_write_is_refused_while_another_is_in_flight(paths: list[Path]) -> None:
    writer = AioWriter(paths)
    ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    writer.write(0, b"first" * 6000, 0, ended.set_result)
    with pytest.raises(OSError, match="in flight"):
        writer.write(1, b"second" * 5000, 0, print)
    assert await ended
    assert paths[0].read_bytes().startswith(b"first" * 6000)
    writer.close()


async def test_releasing_the_buffer_during_a_write_does_not_change_what_is_written(paths: list[Path]) -> None:
    writer = AioWriter(paths)
    ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    writer.write(0, b"x" * 7 * BLOCK_BYTES, 0, ended.set_result)
    writer._buffer.close()
    others = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(4)]
    for other in others:
        other[:] = b"#" * BUFFER_BYTES
    assert await ended
    assert paths[0].read_bytes()[: 7 * BLOCK_BYTES] == b"x" * 7 * BLOCK_BYTES
    writer.close()


async def test_occasional_slow_submits_do_not_mark_the_disk_as_slow(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AioWriter(paths)
    for number in range(3 * SLOW_SUBMITS_MAX):
        monkeypatch.setattr(aio_writer, "SLOW_SUBMIT_S", 60.0 if number % 4 == 3 else -1.0)
        assert await write_and_wait(writer, 0, b"data", 0)
        assert not writer.is_slow
    writer.close()


async def test_closing_a_writer_closes_all_files(paths: list[Path]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    writer = AioWriter(paths)
    await write_and_wait(writer, 0, b"data", 0)
    writer.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(FileNotFoundError):
        AioWriter([paths[0], paths[0].with_name("missing")])
    assert set(os.listdir("/proc/self/fd")) <= before


def thread_writes(journal: Journal) -> bool:
    return journal._thread is not None


async def kernel_written_journal(tmp_path: Path) -> tuple[Journal, list[bytes]]:
    """Return a journal written by the kernel, and the records appended to it."""
    journal = Journal(tmp_path / "j", use_aio=True)
    held = [b"held %d" % number for number in range(3)]
    for record in held:
        await journal.append(record)
    assert journal._aio is not None
    assert not thread_writes(journal)
    return journal, held


async def test_an_unknown_architecture_falls_back_to_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    journal = Journal(tmp_path / "j", use_aio=True)
    await journal.append(b"record")
    assert thread_writes(journal)
    assert remaining_records(tmp_path / "j") == [b"record"]


async def test_a_32_bit_machine_falls_back_to_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    journal = Journal(tmp_path / "j", use_aio=True)
    await journal.append(b"record")
    assert thread_writes(journal)


async def test_a_sandbox_that_forbids_the_system_calls_falls_back_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_given: Any) -> int:
        raise OSError(errno.EPERM, "not permitted")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(AioWriter, "_call", forbidden)
    journal = Journal(tmp_path / "j", use_aio=True)
    await journal.append(b"record")
    await journal.close()
    assert remaining_records(tmp_path / "j") == [b"record"]
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_after_a_failed_kernel_write_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, held = await kernel_written_journal(tmp_path)
    original_event = aio_writer._Event
    monkeypatch.setattr(aio_writer, "_Event", type("Failed", (original_event,), {"result": -errno.EIO}))
    await asyncio.gather(*(journal.append(b"%d" % number) for number in range(5)))
    assert thread_writes(journal)
    assert journal.last_error is None
    await journal.append(b"last")
    assert remaining_records(tmp_path / "j") == [*held, *(b"%d" % number for number in range(5)), b"last"]
    await journal.close()


async def test_after_a_refused_submit_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_given: Any) -> None:
        raise OSError(errno.EAGAIN, "try again")

    journal, held = await kernel_written_journal(tmp_path)
    monkeypatch.setattr(AioWriter, "write", refused)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j") == [*held, b"after"]


async def test_after_any_error_in_a_submit_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_given: Any) -> None:
        raise MemoryError

    journal, held = await kernel_written_journal(tmp_path)
    monkeypatch.setattr(AioWriter, "write", no_memory)
    await asyncio.wait_for(journal.append(b"after"), DEADLINE_S)
    assert remaining_records(tmp_path / "j") == [*held, b"after"]


async def test_the_kernel_alternates_files_and_the_thread_writes_once_a_file_must_grow(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", file_bytes=BLOCK_BYTES, use_aio=True)
    for number in range(50):
        journal.release([await journal.append(b"released %d".ljust(400) % number)])
    assert not thread_writes(journal)
    assert [status.st_size for status in map(os.stat, (tmp_path / "j-1", tmp_path / "j-2"))] == [BLOCK_BYTES, BLOCK_BYTES]
    held = [b"held %d".ljust(400) % number for number in range(50)]
    for record in held:
        await journal.append(record)
    assert thread_writes(journal)
    assert set(held) <= set(remaining_records(tmp_path / "j"))


async def test_a_truncated_file_is_recreated_for_the_next_write(tmp_path: Path) -> None:
    journal, _held = await kernel_written_journal(tmp_path)
    for name in ("j-1", "j-2"):
        os.truncate(tmp_path / name, 0)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j") == [b"after"]


async def test_closing_waits_for_a_write_whose_appender_was_cancelled(tmp_path: Path) -> None:
    journal, held = await kernel_written_journal(tmp_path)
    task = asyncio.create_task(journal.append(b"cancelled"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert journal._aio is not None
    assert journal._aio.is_busy
    task.cancel()
    await journal.close()
    assert remaining_records(tmp_path / "j") == [*held, b"cancelled"]


async def test_a_record_larger_than_the_buffer_is_written(tmp_path: Path) -> None:
    journal, held = await kernel_written_journal(tmp_path)
    await asyncio.gather(journal.append(b"x" * BUFFER_BYTES), journal.append(b"behind"))
    assert remaining_records(tmp_path / "j") == [*held, b"x" * BUFFER_BYTES, b"behind"]


async def test_a_disk_that_blocks_every_submit_falls_back_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_writer, "SLOW_SUBMIT_S", -1.0)
    journal = Journal(tmp_path / "j", use_aio=True)
    for number in range(SLOW_SUBMITS_MAX):
        await journal.append(b"%d" % number)
    assert not thread_writes(journal)
    await journal.append(b"last")
    assert thread_writes(journal)
    assert len(remaining_records(tmp_path / "j")) == SLOW_SUBMITS_MAX + 1


async def test_a_write_that_never_completes_is_reported_and_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.05)
    journal, held = await kernel_written_journal(tmp_path)
    kernel = journal._aio
    assert kernel is not None
    monkeypatch.setattr(AioWriter, "_on_completion", lambda _self: None)
    asyncio.get_running_loop().remove_reader(kernel._eventfd)
    stuck = asyncio.create_task(journal.append(b"stuck"))
    await poll_until(lambda: "has not returned" in str(journal.last_error))
    await journal.close()
    stuck.cancel()
    assert remaining_records(tmp_path / "j")[: len(held)] == held


async def test_appends_of_one_loop_iteration_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _held = await kernel_written_journal(tmp_path)
    sizes: list[int] = []
    write = AioWriter.write

    def record_num_lines(self: AioWriter, index: int, data: bytes, offset: int, on_end: Any) -> None:
        sizes.append(data.count(b"\n"))
        write(self, index, data, offset, on_end)

    monkeypatch.setattr(AioWriter, "write", record_num_lines)
    await asyncio.gather(*(journal.append(b"%d" % number) for number in range(40)))
    assert sizes == [40]


async def _hanging_append(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[int]:
    """Append a record whose completion the event loop does not see."""
    with monkeypatch.context() as hanging:
        hanging.setattr(AioWriter, "_on_completion", lambda _aio: None)
        waiting = asyncio.create_task(journal.append(b"one"))
        await poll_until(lambda: journal._aio is not None and journal._aio.is_busy)
    return waiting


async def _complete(journal: Journal, waiting: asyncio.Task[int]) -> None:
    assert journal._aio is not None
    while not waiting.done():
        journal._aio._on_completion()
        await asyncio.sleep(0)


async def test_a_write_that_lasts_only_because_the_process_stood_still_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", use_aio=True)
    waiting = await _hanging_append(journal, monkeypatch)
    with monkeypatch.context() as paused:
        paused.setattr(journal_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0))
        assert journal.last_error is None
    await _complete(journal, waiting)


async def test_a_write_that_hangs_is_reported_until_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.01)
    monkeypatch.setattr(awake_time, "TICK_S", 0.02)
    journal = Journal(tmp_path / "j", use_aio=True)
    waiting = await _hanging_append(journal, monkeypatch)
    await poll_until(lambda: "has not returned" in str(journal.last_error))
    await _complete(journal, waiting)
    assert journal.last_error is None
