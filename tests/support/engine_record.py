"""The record of one engine process in a file that survives it: the ground truth with which the ledger is compared.

It has the tokens computed and generated for each request, how many of them the operating system has accepted for the gateway,
and the time of each step. The file is a shared memory map, so that SIGKILL loses nothing.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

REQUESTS_MAX = 8192
STEPS_MAX = 65_536
_HEAD = struct.Struct("<QQ")  # requests, steps
_REQUEST = struct.Struct("<40sQQQQQ")  # id, answers, prompt computed, generated, sent, first step
_STEP = struct.Struct("<d")
_STEPS_AT = _HEAD.size + REQUESTS_MAX * _REQUEST.size
_FILE_BYTES = _STEPS_AT + STEPS_MAX * _STEP.size


@dataclass(slots=True)
class Work:
    """What an engine did for one request. The gateway can read `sent` tokens even if the engine is killed."""

    request_id: str
    num_answers: int
    prompt_tokens: int = 0
    generated: int = 0
    sent: int = 0
    first_step: int = 0


class EngineRecordWriter:
    """Writes the record: every change is in the file before the gateway can receive it."""

    def __init__(self, path: Path) -> None:
        with path.open("xb") as file:
            file.truncate(_FILE_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._slots: dict[str, int] = {}
        self._steps = 0

    def step(self, now_s: float) -> int:
        """Record the start of a step; return its number."""
        assert self._steps < STEPS_MAX, "the file has no room for more steps"
        _STEP.pack_into(self._map, _STEPS_AT + self._steps * _STEP.size, now_s)
        self._steps += 1
        self._write_head()
        return self._steps - 1

    def write(self, work: Work) -> None:
        """Record the progress of a request."""
        slot = self._slots.get(work.request_id)
        if slot is None:
            slot = self._slots[work.request_id] = len(self._slots)
            assert slot < REQUESTS_MAX, "the file has no room for more requests"
        row = (work.request_id.encode(), work.num_answers, work.prompt_tokens, work.generated, work.sent, work.first_step)
        _REQUEST.pack_into(self._map, _HEAD.size + slot * _REQUEST.size, *row)
        self._write_head()

    def _write_head(self) -> None:
        _HEAD.pack_into(self._map, 0, len(self._slots), self._steps)


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The record of one engine process."""

    requests: dict[str, Work]
    steps_s: list[float]

    @classmethod
    def read(cls, path: Path) -> EngineRecord:
        """Read the record in `path`."""
        content = path.read_bytes()
        num_requests, num_steps = _HEAD.unpack_from(content)
        works = [_work(content, slot) for slot in range(num_requests)]
        steps_s = [_STEP.unpack_from(content, _STEPS_AT + step * _STEP.size)[0] for step in range(num_steps)]
        return cls({work.request_id: work for work in works}, steps_s)

    def lost_s(self, request_id: str, billed: int) -> float:
        """Return the seconds over which the tokens after the first `billed` ones were generated; 0 for none."""
        work = self.requests[request_id]
        if billed >= work.generated:
            return 0.0
        first, last = (work.first_step + token // work.num_answers for token in (billed, work.generated - 1))
        return self.steps_s[min(last, len(self.steps_s) - 1)] - self.steps_s[first]


def _work(content: bytes, slot: int) -> Work:
    name, *counts = _REQUEST.unpack_from(content, _HEAD.size + slot * _REQUEST.size)
    answers, prompt_tokens, generated, sent, first_step = counts
    return Work(name.rstrip(b"\x00").decode(), answers, prompt_tokens, generated, sent, first_step)
