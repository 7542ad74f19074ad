"""The journal: records acknowledged by `append` survive a crash, others do not, and no file grows without bound."""

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
from tests.support.ledgers import poll_until

BOTH = pytest.mark.parametrize("use_aio", [False, True], ids=["thread", "kernel"])


def _files_in(folder: Path) -> list[os.stat_result]:
    return [path.stat() for path in folder.iterdir()]


@BOTH
async def test_what_was_appended_is_found_after_a_death_in_its_order(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    records = [b"record %d" % number for number in range(50)]
    numbers = await asyncio.gather(*(journal.append(record) for record in records))
    assert numbers == sorted(numbers)
    assert remaining_records(tmp_path / "j") == records


@BOTH
async def test_nothing_is_left_of_records_that_stand_elsewhere_once_it_is_closed(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    journal.release([await journal.append(b"one"), await journal.append(b"two")])
    await journal.close()
    assert remaining_records(tmp_path / "j") == []


@BOTH
async def test_closing_keeps_what_stands_nowhere_else(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    number = await journal.append(b"one")
    await journal.append(b"two")
    journal.release([number])
    await journal.close()
    assert b"two" in remaining_records(tmp_path / "j")


@BOTH
async def test_closing_writes_what_waits(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    waiting = [asyncio.create_task(journal.append(b"%d" % number)) for number in range(5)]
    await asyncio.sleep(0)
    await journal.close()
    await asyncio.gather(*waiting)
    assert len(remaining_records(tmp_path / "j")) == 5


@BOTH
async def test_a_journal_that_is_closed_touches_no_file_of_others_that_has_its_number(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    journal.release([await journal.append(b"one")])
    await journal.close()
    others = [os.memfd_create("other") for _ in range(8)]
    for other in others:
        os.write(other, b"dear")
    with pytest.raises(OSError, match="closed"):
        await journal.append(b"late")
    await journal.close()
    assert [os.pread(other, 99, 0) for other in others] == [b"dear"] * len(others)
    for other in others:
        os.close(other)


@BOTH
async def test_what_is_appended_while_the_journal_is_closed_is_refused_or_found(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    told: list[bytes] = []

    async def append_until_refused(name: int) -> None:
        with suppress(OSError):
            while True:
                record = b"%d %d" % (name, len(told))
                await journal.append(record)
                told.append(record)

    tasks = [asyncio.create_task(append_until_refused(name)) for name in range(6)]
    await poll_until(lambda: len(told) > 100)
    await journal.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert set(remaining_records(tmp_path / "j")) == set(told)


@BOTH
async def test_a_cleared_journal_is_empty_whatever_it_held(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    await asyncio.gather(*(journal.append(b"of an earlier life %d" % number) for number in range(30)))
    later = Journal(tmp_path / "j", use_aio=use_aio)
    later.clear()
    await later.append(b"of an earlier life 0")
    assert remaining_records(tmp_path / "j") == [b"of an earlier life 0"]


@BOTH
async def test_two_files_take_turns_and_neither_grows(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", file_bytes=4000, use_aio=use_aio)
    for number in range(500):
        journal.release([await journal.append(b"record %d" % number)])
    sizes = [status.st_size for status in _files_in(tmp_path)]
    assert len(sizes) == 2
    assert max(sizes) < 4200


@BOTH
async def test_a_file_with_a_record_that_stands_nowhere_else_is_not_used_again(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", file_bytes=500, use_aio=use_aio)
    await journal.append(b"held")
    for number in range(200):
        journal.release([await journal.append(b"record %d" % number)])
    assert b"held" in remaining_records(tmp_path / "j")


@pytest.mark.parametrize("seed", range(20))
@BOTH
async def test_whenever_a_process_dies_what_was_held_is_left_and_what_was_torn_is_not(
    tmp_path: Path, use_aio: bool, seed: int
) -> None:
    chance = random.Random(seed)
    journal = Journal(tmp_path / "j", file_bytes=400, use_aio=use_aio)
    held: dict[int, bytes] = {}
    told: set[bytes] = set()
    for step in range(chance.randrange(5, 80)):
        records = [b"%d.%d %s" % (step, index, b"x" * chance.randrange(40)) for index in range(chance.randrange(1, 5))]
        numbers = await asyncio.gather(*(journal.append(record) for record in records))
        held |= dict(zip(numbers, records, strict=True))
        told |= set(records)
        for number in chance.sample(sorted(held), chance.randrange(len(held) + 1)):
            journal.release([number])
            del held[number]
    # Death in the middle of a write that nobody was told of: some of its lines arrive, in any order, whole or not.
    file, end = journal._files[journal._current], journal._ends[journal._current]
    torn = b"".join(journal_module._line(journal._next_number + index, b"torn") for index in range(3))
    cut = chance.randrange(len(torn))
    os.pwrite(file, torn[:cut] if chance.random() < 0.5 else bytes(cut) + torn[cut:], end)
    left = remaining_records(tmp_path / "j")
    assert set(held.values()) <= set(left)
    assert set(left) <= told | {b"torn"}
    assert len(left) == len(set(left)) + max(0, left.count(b"torn") - 1)


async def test_a_write_that_fails_is_told_and_the_next_one_takes_its_place(
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


@BOTH
async def test_who_is_cancelled_holds_nothing(tmp_path: Path, use_aio: bool) -> None:
    journal = Journal(tmp_path / "j", use_aio=use_aio)
    task = asyncio.create_task(journal.append(b"left"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await journal.append(b"right")
    assert list(journal._unreleased.values()) == [None]


@pytest.mark.parametrize("record", [b"", b"two\nlines"])
async def test_a_record_is_one_line(tmp_path: Path, record: bytes) -> None:
    with pytest.raises(ValueError, match="one non-empty line"):
        await Journal(tmp_path / "j").append(record)


@BOTH
async def test_the_files_are_for_their_owner_alone(tmp_path: Path, use_aio: bool) -> None:
    await Journal(tmp_path / "j", use_aio=use_aio).close()
    assert {status.st_mode & 0o777 for status in _files_in(tmp_path)} == {0o600}


async def test_what_is_left_comes_in_its_order_from_whichever_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", file_bytes=200)
    records = [b"record %d" % number for number in range(30)]
    numbers = [await journal.append(record) for record in records[:12]]
    journal.release(numbers)
    for record in records[12:]:
        await journal.append(record)
    left = remaining_records(tmp_path / "j")
    assert left == sorted(left, key=records.index)
    assert set(records[12:]) <= set(left)


async def test_looking_at_what_is_left_makes_no_file(tmp_path: Path) -> None:
    assert remaining_records(tmp_path / "j") == []
    assert _files_in(tmp_path) == []


async def test_no_error_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_thread_that_cannot_be_started_holds_nothing_and_is_tried_again(
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


async def test_a_write_that_does_not_return_is_an_error_until_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.01)
    journal, answers, write = Journal(tmp_path / "j"), Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: answers.wait() and write(*given))
    waiting = asyncio.create_task(journal.append(b"one"))
    await poll_until(lambda: "has not returned" in str(journal.last_error))
    answers.set()
    await waiting
    assert journal.last_error is None


async def test_closing_does_not_wait_for_a_write_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "STUCK_S", 0.01)
    journal, answers, write = Journal(tmp_path / "j"), Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: answers.wait() and write(*given))
    waiting = asyncio.create_task(journal.append(b"one"))
    await poll_until(lambda: journal.last_error is not None)
    await journal.close()
    answers.set()
    await waiting
    assert remaining_records(tmp_path / "j") == [b"one"]


async def test_what_one_call_does_not_write_the_next_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _harm(folder: Path, harm: str) -> None:
    for path in folder.iterdir():
        path.unlink() if harm == "deleted" else os.truncate(path, 0)


@BOTH
@pytest.mark.parametrize("harm", ["deleted", "cut short"])
async def test_a_file_that_is_harmed_while_it_is_in_use_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, use_aio: bool
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    journal = Journal(tmp_path / "j", file_bytes=4096, use_aio=use_aio)
    for number in range(8):
        journal.release([await journal.append(b"before %d" % number)])
    _harm(tmp_path, harm)
    await journal.append(b"after")
    assert remaining_records(tmp_path / "j")[-1:] == [b"after"]
    assert [status.st_size for status in _files_in(tmp_path)] == [4096, 4096]
