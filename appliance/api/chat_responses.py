"""The JSON of chat completions: whole responses, and the chunks of a stream, encoded as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from appliance.metering.ledger.records import Usage
from appliance.serving.chunks import Chunk, NamedLogprob
from appliance.serving.endings import Outcome

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_TOKENS = b"\0"  # placeholder for the log-probabilities of a choice: no encoded text contains this byte

encode = msgspec.json.encode


class TokenDetails(msgspec.Struct, kw_only=True):
    """Details of the prompt tokens."""

    cached_tokens: int


class UsageShape(msgspec.Struct, kw_only=True):
    """The billed tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The generated message."""

    role: str
    content: str
    refusal: str | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One of the `n` generated choices."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A chat completion that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageShape
    system_fingerprint: str | None = None
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


def usage_shape(usage: Usage) -> UsageShape:
    """Return the JSON of `usage`."""
    return UsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=usage.cached_tokens),
    )


def logprobs_shape(entries: Sequence[NamedLogprob]) -> dict[str, Any]:
    """Return the JSON of the log-probabilities of some tokens."""
    return {"content": _token_logprobs(entries), "refusal": None}


def _token_logprobs(entries: Sequence[NamedLogprob]) -> list[dict[str, Any]]:
    return [{**_token_logprob(entry), "top_logprobs": [_token_logprob(top) for top in entry.top]} for entry in entries]


def _token_logprob(entry: NamedLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.token_bytes)}


class ChunkFramer:
    """Makes the frames of one stream. The fields that all chunks share are encoded once."""

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        prompt_tokens: int,
        num_answers: int,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
        service_tier: str | None = None,
    ) -> None:
        shared = {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
        if service_tier is not None:
            shared["service_tier"] = service_tier
        self._head = b"data: " + encode(shared)[:-1] + b',"system_fingerprint":null,"choices":['
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._completion_tokens = dict.fromkeys(range(num_answers), 0)
        self._open = list(range(num_answers))
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def first(self) -> bytes:
        """Return the first chunk of each choice, which carries the role."""
        return b"".join(self._frame(index, {"role": "assistant", "content": "", "refusal": None}) for index in self._open)

    def text(self, chunk: Chunk) -> bytes:
        """Return a chunk of text, with the finish reason if its choice ends while other choices of the request continue."""
        self._completion_tokens[chunk.index] = chunk.completion_tokens
        if chunk.index == 0:
            self._cached_tokens = min(chunk.cached_tokens, self._prompt_tokens)
        if chunk.finish_reason is not None:
            self._open.remove(chunk.index)
        delta = {"content": chunk.text} if chunk.text or chunk.finish_reason is None else {}
        logprobs = logprobs_shape(chunk.logprobs) if self._logprobs and (delta or chunk.logprobs) else None
        return self._frame(chunk.index, delta, logprobs=logprobs, finish_reason=chunk.finish_reason)

    def last(self, outcome: Outcome) -> bytes:
        """Return the end of a successful stream: the finish reason of each choice still open, the usage if requested, and
        `[DONE]`."""
        usage = outcome.usage
        self._cached_tokens = usage.cached_tokens
        self._completion_tokens = {0: usage.completion_tokens}
        finish = b"".join(self._frame(index, {}, finish_reason=outcome.finish_reasons[index]) for index in self._open)
        if not self._include_usage:
            return finish + DONE
        return finish + self._head + b'],"usage":' + encode(usage_shape(usage)) + b"}\n\n" + DONE

    def _frame(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = encode({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
        return self._head + choice + b"]" + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        """Return the `usage` field of a chunk: the usage so far if every chunk carries it, null if only the last one does."""
        if self._continuous_usage:
            usage = Usage(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                completion_tokens=sum(self._completion_tokens.values()),
            )
            return b',"usage":' + encode(usage_shape(usage))
        return b',"usage":null' if self._include_usage else b""


class CompletionBuilder:
    """Builds a completion that is not streamed from its chunks.

    Log-probabilities, of which a request with many choices has millions, are encoded as they arrive. Kept as objects, scanned
    by the garbage collector and encoded at the end, they would block all streams of all tenants for seconds. For the same
    reason the encoded parts, which are most of the body, are not joined at the end.
    """

    def __init__(self, num_answers: int, *, logprobs: bool) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_answers)]
        self._tokens: list[list[bytes]] | None = [[] for _ in range(num_answers)] if logprobs else None
        self._token_bytes = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        self._texts[chunk.index].append(chunk.text)
        if self._tokens is not None and chunk.logprobs:
            encoded = encode(_token_logprobs(chunk.logprobs))[1:-1]
            self._tokens[chunk.index].append(encoded)
            self._token_bytes += len(encoded)

    def body(
        self, *, request_id: str, created: int, model: str, outcome: Outcome, service_tier: str | None = None
    ) -> tuple[Iterable[bytes], int]:
        """Return the body of the finished completion in parts, and its length in bytes."""
        frame = encode(
            ChatCompletion(
                id=request_id,
                object="chat.completion",
                created=created,
                model=model,
                choices=[self._choice(index, reason) for index, reason in enumerate(outcome.finish_reasons)],
                usage=usage_shape(outcome.usage),
                service_tier=service_tier or msgspec.UNSET,
            )
        )
        if self._tokens is None:
            return (frame,), len(frame)
        between = frame.split(_TOKENS)
        num_bytes = sum(map(len, between)) + sum(max(len(tokens) - 1, 0) for tokens in self._tokens)
        return _with_tokens(between, self._tokens), num_bytes + self._token_bytes

    def _choice(self, index: int, finish_reason: str) -> Choice:
        logprobs: dict[str, Any] | None = None
        if self._tokens is not None:
            logprobs = {"content": msgspec.Raw(b"[" + _TOKENS + b"]"), "refusal": None}
        message = AnswerMessage(role="assistant", content="".join(self._texts[index]))
        return Choice(index=index, message=message, logprobs=logprobs, finish_reason=finish_reason)


def _with_tokens(between: Sequence[bytes], tokens: Sequence[Sequence[bytes]]) -> Iterator[bytes]:
    """Yield the parts of the body `between` the choices' log-probabilities and, after each, those of one choice, separated by
    commas."""
    for before, encoded in zip(between, tokens, strict=False):
        yield before
        for index, token in enumerate(encoded):
            if index:
                yield b","
            yield token
    yield between[-1]
