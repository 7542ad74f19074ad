"""The fake engine as a process that records what it does (`engine_record.py`)."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from pathlib import Path

from engine.protocol import EngineFrame, TokenEvent
from tests.support.engine_record import EngineRecordWriter, Work
from tests.support.fake_engine import FakeEngine, _Live


class RecordingEngine(FakeEngine):
    """Records each token before sending it, and that it was sent once the socket has accepted it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, step_s: float, record: EngineRecordWriter
    ) -> None:
        super().__init__(reader, writer, step_s=step_s)
        self._record = record
        self._works: dict[str, Work] = {}
        self._unsent: set[str] = set()
        self._step_noted = (-1, 0)

    def _advance(self, live: _Live) -> TokenEvent | None:
        made = super()._advance(live)
        if made is not None and made.token_ids:
            work = self._work(live.request.request_id, live.request.sampling.n)
            step = self._step()
            if work.generated == 0:
                work.first_step = step
            work.generated += len(made.token_ids)
            self._record.write(work)
        return made

    def send(self, frame: EngineFrame) -> None:
        """Send one frame; record its content before and, if the socket accepted all of it, that it was sent."""
        for event in frame.events:
            work = self._work(event.request_id)
            work.prompt_tokens = max(work.prompt_tokens, event.num_prompt_tokens_computed)
            self._record.write(work)
            self._unsent.add(event.request_id)
        super().send(frame)
        if self._unsent and self._writer.transport.get_write_buffer_size() == 0:
            for request_id in self._unsent:
                work = self._works[request_id]
                work.sent = work.generated
                self._record.write(work)
            self._unsent.clear()

    def _work(self, request_id: str, num_answers: int = 1) -> Work:
        work = self._works.get(request_id)
        if work is None:
            work = self._works[request_id] = Work(request_id, num_answers)
        return work

    def _step(self) -> int:
        """Return the number of the running step in the record, which is added when its first token is generated."""
        if self._step_noted[0] != self._steps:
            self._step_noted = (self._steps, self._record.step(time.monotonic()))
        return self._step_noted[1]


async def _serve(fd: int, step_s: float, record: EngineRecordWriter) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    await RecordingEngine(reader, writer, step_s=step_s, record=record).run()


def main() -> None:
    """Run as a process on an inherited socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--records", type=Path, required=True)
    options = parser.parse_args()
    record = EngineRecordWriter(options.records / f"{time.monotonic_ns()}-{os.getpid()}.record")
    asyncio.run(_serve(options.fd, options.step_s, record))


if __name__ == "__main__":
    main()
