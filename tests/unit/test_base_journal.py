"""The journal: acknowledged records survive a crash, files are reused and bounded, and write errors are retried."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import structlog

from appliance.base import journal as journal_module
from appliance.base.aio_writer import BLOCK_BYTES
from appliance.base.journal import Journal, remaining_records
from tests.support.polling import poll_until

BOTH_WRITERS = pytest.mark.parametrize("use_aio", [False, True], ids=["thread", "kernel"])


def _files_in(folder: Path) -> list[os.stat_result]:
    return [path.stat() for path in folder.iterdir()]


@BOTH_WRITERS
async def test_appended_records_are_found_in_order_after_a_crash(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    records = [b"record %d" % number for number in range(50)]
    numbers = await asyncio.gather(*(journal.append(record) for record in records))
    assert numbers == sorted(numbers)
    assert remaining_records(tmp_path / "j") == records


@BOTH_WRITERS
async def test_closing_removes_released_records(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    journal.release([await journal.append(b"one"), await journal.append(b"two")])
    await journal.close()
    assert remaining_records(tmp_path / "j") == []


@BOTH_WRITERS
async def test_closing_keeps_records_that_are_not_released(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    number = await journal.append(b"one")
    await journal.append(b"two")
    journal.release([number])
    await journal.close()
    assert b"two" in remaining_records(tmp_path / "j")


@BOTH_WRITERS
async def test_closing_writes_pending_records(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    waiting = [asyncio.create_task(journal.append(b"%d" % number)) for number in range(5)]
    await asyncio.sleep(0)
    await journal.close()
    await asyncio.gather(*waiting)
    assert len(remaining_records(tmp_path / "j")) == 5


@BOTH_WRITERS
async def test_a_closed_journal_does_not_write_to_reused_file_descriptors(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    journal.release([await journal.append(b"one")])
    await journal.close()
    others = [os.memfd_create("other") for _ in range(8)]
    for other in others:
        os.write(other, b"content")
    with pytest.raises(OSError, match="closed"):
        await journal.append(b"late")
    await journal.close()
    assert [os.pread(other, 99, 0) for other in others] == [b"content"] * len(others)
    for other in others:
        os.close(other)


@BOTH_WRITERS
async def test_appends_during_closing_are_refused_or_written(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    acknowledged: list[bytes] = []

    async def append_until_refused(name: int) -> None:
        with suppress(OSError):
            while True:
                record = b"%d %d" % (name, len(acknowledged))
                await journal.append(record)
                acknowledged.append(record)

    tasks = [asyncio.create_task(append_until_refused(name)) for name in range(6)]
    await poll_until(lambda: len(acknowledged) > 100)
    await journal.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert set(remaining_records(tmp_path / "j")) == set(acknowledged)


@BOTH_WRITERS
async def test_a_cleared_journal_is_empty(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    await asyncio.gather(*(journal.append(b"of an earlier process %d" % number) for number in range(30)))
    later = Journal(tmp_path / "j", use_aio=use_aio)
    later.clear()
    await later.append(b"of an earlier process 0")
    assert remaining_records(tmp_path / "j") == [b"of an earlier process 0"]


@BOTH_WRITERS
async def test_two_files_alternate_and_stay_bounded(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", file_bytes=BLOCK_BYTES, use_aio=use_aio)
    for number in range(50):
        journal.release([await journal.append(b"record %d".ljust(400) % number)])
    sizes = [status.st_size for status in _files_in(tmp_path)]
    assert len(sizes) == 2
    assert max(sizes) == BLOCK_BYTES


@BOTH_WRITERS
async def test_a_file_with_an_unreleased_record_is_not_reused(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", file_bytes=BLOCK_BYTES, use_aio=use_aio)
    await journal.append(b"held")
    for number in range(50):
        journal.release([await journal.append(b"record %d".ljust(400) % number)])
    assert b"held" in remaining_records(tmp_path / "j")


@pytest.mark.parametrize("seed", range(20))
@BOTH_WRITERS
async def test_after_a_crash_at_any_time_unreleased_records_remain_and_torn_ones_do_not(
    tmp_path: Path, use_aio: bool, seed: int
) -> None:
    rng = random.Random(seed)
    journal = Journal(tmp_path / "j", file_bytes=400, use_aio=use_aio)
    held: dict[int, bytes] = {}
    acknowledged: set[bytes] = set()
    for step in range(rng.randrange(5, 80)):
        records = [b"%d.%d %s" % (step, index, b"x" * rng.randrange(40)) for index in range(rng.randrange(1, 5))]
        numbers = await asyncio.gather(*(journal.append(record) for record in records))
        held |= dict(zip(numbers, records, strict=True))
        acknowledged |= set(records)
        for number in rng.sample(sorted(held), rng.randrange(len(held) + 1)):
            journal.release([number])
            del held[number]
    # A crash during an unacknowledged write: some of its lines are written, in any order, complete or torn.
    file, end = journal._files[journal._current], journal._ends[journal._current]
    torn = b"".join(journal_module._line(journal._next_number + index, b"torn") for index in range(3))
    cut = rng.randrange(len(torn))
    os.pwrite(file, torn[:cut] if rng.random() < 0.5 else bytes(cut) + torn[cut:], end)
    left = remaining_records(tmp_path / "j")
    assert set(held.values()) <= set(left)
    assert set(left) <= acknowledged | {b"torn"}
    assert len(left) == len(set(left)) + max(0, left.count(b"torn") - 1)


async def test_a_failed_write_is_reported_and_overwritten_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    journal = Journal(tmp_path / "j")
    await journal.append(b"before")
    failing = True
    write = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if failing:
            write(file, bytes(data)[:7], offset)
            raise OSError(errno.ENOSPC, "no space left")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="no space left"):
        await journal.append(b"refused")
    assert "no space left" in str(journal.last_error)
    failing = False
    await poll_until(lambda: journal.last_error is None)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j") == [b"before", b"after"]


@BOTH_WRITERS
async def test_a_cancelled_append_leaves_no_unreleased_record(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    task = asyncio.create_task(journal.append(b"left"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await journal.append(b"right")
    assert list(journal._unreleased.values()) == [None]


@pytest.mark.parametrize("record", [b"", b"two\nlines"])
async def test_a_record_must_be_one_non_empty_line(tmp_path: Path, record: bytes) -> None:
    with pytest.raises(ValueError, match="one non-empty line"):
        await Journal(tmp_path / "j").append(record)


@BOTH_WRITERS
async def test_files_have_mode_0600(tmp_path: Path, use_aio: bool) -> None:
    await Journal(tmp_path / "j", use_aio=use_aio).close()
    assert {status.st_mode & 0o777 for status in _files_in(tmp_path)} == {0o600}


async def test_remaining_records_are_in_order_across_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", file_bytes=200)
    records = [b"record %d" % number for number in range(30)]
    numbers = [await journal.append(record) for record in records[:12]]
    journal.release(numbers)
    for record in records[12:]:
        await journal.append(record)
    left = remaining_records(tmp_path / "j")
    assert left == sorted(left, key=records.index)
    assert set(records[12:]) <= set(left)


async def test_reading_remaining_records_creates_no_file(tmp_path: Path) -> None:
    assert remaining_records(tmp_path / "j") == []
    assert _files_in(tmp_path) == []


async def test_no_error_ends_the_writing_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    journal = Journal(tmp_path / "j")
    with monkeypatch.context() as failing:
        failing.setattr(os, "pwrite", _no_memory)
        with pytest.raises(OSError, match="MemoryError"), structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(journal.append(b"refused"), 60)
        assert "MemoryError" in str(journal.last_error)
        assert [line["event"] for line in logs if line.get("exc_info")] != []  # with its traceback
    await poll_until(lambda: journal.last_error is None)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j") == [b"after"]


def _no_memory(*_arguments: Any) -> int:
    raise MemoryError


async def test_a_thread_that_cannot_be_started_is_retried_at_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    with monkeypatch.context() as failing:
        failing.setattr(Thread, "start", _no_thread)
        with pytest.raises(RuntimeError):
            await journal.append(b"refused")
    assert not journal._unreleased
    await asyncio.wait_for(journal.append(b"after"), 60)
    assert remaining_records(tmp_path / "j") == [b"after"]


def _no_thread(*_arguments: Any) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_write_that_hangs_is_reported_until_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.01)
    journal, may_write, write = Journal(tmp_path / "j"), Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: may_write.wait() and write(*given))
    waiting = asyncio.create_task(journal.append(b"one"))
    await poll_until(lambda: "has not returned" in str(journal.last_error))
    may_write.set()
    await waiting
    assert journal.last_error is None


async def test_closing_does_not_wait_for_a_write_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.01)
    journal, may_write, write = Journal(tmp_path / "j"), Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: may_write.wait() and write(*given))
    waiting = asyncio.create_task(journal.append(b"one"))
    await poll_until(lambda: journal.last_error is not None)
    await journal.close()
    may_write.set()
    await waiting
    assert remaining_records(tmp_path / "j") == [b"one"]


async def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, bytes(data)[: max(1, len(data) // 2)], offset))
    journal = Journal(tmp_path / "j", file_bytes=300)
    for number in range(12):
        await journal.append(b"record %d" % number)
    assert len(remaining_records(tmp_path / "j")) == 12
    journal.clear()
    assert _contents(tmp_path) == [bytes(BLOCK_BYTES), bytes(BLOCK_BYTES)]


def _contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


def _damage(folder: Path, damage: str) -> None:
    for path in folder.iterdir():
        path.unlink() if damage == "deleted" else os.truncate(path, 0)


@BOTH_WRITERS
@pytest.mark.parametrize("damage", ["deleted", "cut short"])
async def test_a_damaged_file_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, use_aio: bool) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    journal = Journal(tmp_path / "j", file_bytes=4096, use_aio=use_aio)
    for number in range(8):
        journal.release([await journal.append(b"before %d" % number)])
    _damage(tmp_path, damage)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j")[-1:] == [b"after"]
    assert [status.st_size for status in _files_in(tmp_path)] == [4096, 4096]
