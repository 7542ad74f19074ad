"""A fake engine that speaks the engine's protocol without a model, for tests of the gateway.

Answers repeat the prompt: token n is the n-th token of the prompt, modulo its length; answer i of several starts with the i-th.
Run as a module, it is a process like `engine.main`. Prompts that begin with the ids below make it misbehave, and a schema that
contains "impossible" is reported as the cause of an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass, replace

from engine.protocol import (
    DecodedToken,
    EngineFrame,
    EngineStatus,
    FinishReason,
    GatewayFrame,
    GenerationRequest,
    RequestProgress,
    TenantProgress,
    TokenEvent,
    TokenLogprob,
)
from engine.switches import switched_off
from engine.transport import LENGTH, decode_gateway_frame, encode_frame
from tests.support.engine_messages import engine_info, engine_status

DIE = 301  # the process ends as soon as such a prompt arrives
FAIL = 302  # the request ends with an error
STALL = 303  # the request is accepted and nothing happens until it is aborted
LATE = 304  # the request ends as if its queue deadline had passed
BLAME = 305  # the request ends with an error caused by its schema
HALF = 306  # the first answer ends with an error, the others continue
BUSY = 307  # the engine is overloaded and rejects the request
ENDLESS_SEED = 308  # an answer with this seed never gets its last token: it ends when it is aborted
STATUS_INTERVAL_S = 0.05
MAX_MODEL_LEN = 1024


@dataclass(slots=True)
class _Live:
    request: GenerationRequest
    index: int = 0
    num_output_tokens: int = 0


class FakeEngine:
    """One connection. A step takes `step_s`; every live request gets one token per step.

    `counted` and `computed` are the engine's own counts of each request's output tokens and computed prompt tokens. If
    `steps_allowed` is set, it makes no more steps than that.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        step_s: float = 0.0,
        seats: int = 64,
        device: str = "cpu",
    ) -> None:
        self._info = engine_info(
            max_model_len=MAX_MODEL_LEN, vocab_size=320, max_num_seqs=seats, device=device, switched_off=switched_off()
        )
        self._reader = reader
        self._writer = writer
        self._step_s = step_s
        self._live: dict[tuple[str, int], _Live] = {}
        self._generated = 0
        self._steps = 0
        self._woken = asyncio.Event()
        self._allowed = asyncio.Event()
        self._num_sent_tokens: dict[tuple[str, int], int] = {}
        self.counted: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self.steps_allowed: int | None = None
        self.frames: list[GatewayFrame] = []

    async def run(self) -> None:
        """Serve until the gateway closes the connection."""
        self.send(EngineFrame(load_fraction=0.5))
        self.send(EngineFrame(ready=self._info))
        stepping = asyncio.create_task(self._step_forever())
        try:
            while True:
                self._receive(decode_gateway_frame(await read_frame(self._reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            stepping.cancel()
            self._writer.close()

    def allow_steps(self, steps: int) -> None:
        """Allow `steps` more steps, and then none until the next call."""
        self.steps_allowed = self._steps + steps
        self._allowed.set()

    def send(self, frame: EngineFrame) -> None:
        """Send one frame; as in the engine, answers that only continue are sent without events."""
        for event in frame.events:
            self.computed[event.request_id] = max(self.computed[event.request_id], event.num_prompt_tokens_computed)
        others: list[TokenEvent] = []
        decoded: list[DecodedToken] = []
        for event in frame.events:
            if self._continues(event):
                decoded.append((event.request_id, event.index, event.token_ids[0]))
            else:
                others.append(event)
        self._writer.write(encode_frame(replace(frame, events=others, decoded=decoded)))

    def _continues(self, event: TokenEvent) -> bool:
        answer = event.request_id, event.index
        before, self._num_sent_tokens[answer] = self._num_sent_tokens.get(answer), event.num_output_tokens
        if before is None or event.finish_reason is not None or event.logprobs is not None:
            return False
        return len(event.token_ids) == 1 and event.num_output_tokens == before + 1

    def _receive(self, frame: GatewayFrame) -> None:
        self.frames.append(frame)
        for request in frame.submit:
            if request.prompt_token_ids[0] == DIE:
                os._exit(9)
            for index in range(request.sampling.n):
                self._live[request.request_id, index] = _Live(request, index)
        aborted = {key for key in self._live if key[0] in frame.abort} | (set(frame.abort_answers) & self._live.keys())
        ended = [self._abort(key) for key in sorted(aborted)]
        if ended:
            self.send(EngineFrame(events=ended))
        if frame.shutdown:
            self._writer.close()
        self._woken.set()

    def _abort(self, key: tuple[str, int]) -> TokenEvent:
        live = self._live.pop(key)
        return make_event(live.request, [], live.num_output_tokens, index=live.index, finish_reason=FinishReason.ABORTED)

    async def _step_forever(self) -> None:
        while True:
            if not any(live.request.prompt_token_ids[0] != STALL for live in self._live.values()):
                self._woken.clear()
                self.send(EngineFrame(status=self._status()))
                try:
                    await asyncio.wait_for(self._woken.wait(), STATUS_INTERVAL_S)
                except TimeoutError:
                    continue
            if self.steps_allowed is not None and self._steps >= self.steps_allowed:
                self._allowed.clear()
                await self._allowed.wait()
                continue
            await asyncio.sleep(self._step_s)
            if not self._live:
                continue
            events = [made for live in list(self._live.values()) if (made := self._advance(live)) is not None]
            self._steps += 1
            self.send(EngineFrame(events=events, status=self._status()))

    def _advance(self, live: _Live) -> TokenEvent | None:
        prompt = live.request.prompt_token_ids
        prompt_id = BLAME if "impossible" in str(live.request.sampling.guided_json) else prompt[0]
        sampling = live.request.sampling
        if prompt_id == STALL or (sampling.seed == ENDLESS_SEED and live.num_output_tokens + 1 >= (sampling.max_tokens or 1)):
            return None
        if prompt_id in _REFUSALS and (prompt_id != HALF or live.index == 0):
            del self._live[live.request.request_id, live.index]
            return make_event(live.request, [], 0, computed=0, index=live.index, **_REFUSALS[prompt_id])  # type: ignore[arg-type]
        token_id = prompt[(live.index + live.num_output_tokens) % len(prompt)]
        live.num_output_tokens += 1
        self._generated += 1
        self.counted[live.request.request_id] += 1
        finish_reason = None
        if live.num_output_tokens >= (live.request.sampling.max_tokens or 1):
            finish_reason = FinishReason.LENGTH
            del self._live[live.request.request_id, live.index]
        return make_event(live.request, [token_id], live.num_output_tokens, index=live.index, finish_reason=finish_reason)

    def _status(self) -> EngineStatus:
        return engine_status(
            num_running=len(self._live),
            num_waiting=0,
            generation_tokens_total=self._generated,
            steps_total=self._steps,
            requests=[progress(live) for live in self._live.values()],
            tenants=[self._tenant(tenant_id) for tenant_id in {live.request.tenant_id for live in self._live.values()}],
        )

    def _tenant(self, tenant_id: str) -> TenantProgress:
        begun = [live.num_output_tokens > 0 for live in self._live.values() if live.request.tenant_id == tenant_id]
        running = sum(begun)
        return TenantProgress(
            tenant_id=tenant_id,
            num_running=running,
            num_waiting=len(begun) - running,
            kv_blocks=len(begun),
            service_s=0.25,
        )


def progress(live: _Live) -> RequestProgress:
    """Return the progress of a live request."""
    return RequestProgress(
        request_id=live.request.request_id,
        state="decode" if live.num_output_tokens else "queued",
        queue_position=None if live.num_output_tokens else 0,
        kv_blocks=1,
        num_computed_tokens=len(live.request.prompt_token_ids),
        num_output_tokens=live.num_output_tokens,
        num_preemptions=0,
        index=live.index,
    )


_REFUSALS: dict[int, dict[str, object]] = {
    FAIL: {"finish_reason": FinishReason.ERROR, "error": "asked to fail"},
    HALF: {"finish_reason": FinishReason.ERROR, "error": "asked to fail"},
    LATE: {"finish_reason": FinishReason.DEADLINE},
    BUSY: {"finish_reason": FinishReason.OVERLOADED, "error": "512 grammars are already waiting"},
    BLAME: {"finish_reason": FinishReason.ERROR, "error": "the schema is impossible", "error_param": "guided_json"},
}


def make_event(
    request: GenerationRequest,
    token_ids: list[int],
    num_output_tokens: int,
    *,
    computed: int | None = None,
    index: int = 0,
    finish_reason: FinishReason | None = None,
    error: str | None = None,
    error_param: str | None = None,
) -> TokenEvent:
    """Return an event of `request`; its prompt counts as computed unless `computed` is given."""
    logprobs = None
    if request.sampling.logprobs is not None:
        top = list(range(4, 4 + request.sampling.logprobs))
        logprobs = [TokenLogprob(logprob=-0.5, top_token_ids=top, top_logprobs=[-1.0] * len(top)) for _ in token_ids]
    if computed is None:
        computed = len(request.prompt_token_ids) if request.prompt_token_ids[0] != STALL else 0
    return TokenEvent(
        request_id=request.request_id,
        token_ids=token_ids,
        num_output_tokens=num_output_tokens,
        num_prompt_tokens_computed=computed,
        queue_s=0.001,
        logprobs=logprobs,
        finish_reason=finish_reason,
        error=error,
        index=index,
        error_param=error_param,
    )


def command(fd: int, *options: str) -> list[str]:
    """Return the command line that runs this module on an inherited socket."""
    return [sys.executable, "-m", "tests.support.fake_engine", "--fd", str(fd), *options]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next frame. Raises IncompleteReadError or ConnectionError at the end of the stream."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


async def connected_pair() -> tuple[socket.socket, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Return connected ends: a socket for an engine client, and streams for a fake engine."""
    ours, theirs = socket.socketpair()
    return ours, await asyncio.open_unix_connection(sock=theirs)


async def _serve(fd: int, step_s: float, device: str) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    await FakeEngine(reader, writer, step_s=step_s, device=device).run()


def main() -> None:
    """Run as a process on an inherited socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fatal")
    parser.add_argument("--may-pass", action="store_true")
    parser.add_argument("--bug", action="store_true")
    options = parser.parse_args()
    if options.fatal:
        with socket.socket(fileno=options.fd) as connection:
            frame = EngineFrame(fatal=options.fatal, may_pass=options.may_pass or options.bug, is_bug=options.bug)
            connection.sendall(encode_frame(frame))
        return
    asyncio.run(_serve(options.fd, options.step_s, options.device))


if __name__ == "__main__":
    main()
