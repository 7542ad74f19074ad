"""One request of `LLM` while it runs: collects its events, finds stop strings, and becomes a `RequestOutput`. No torch."""

from __future__ import annotations

import time

from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.protocol import FinishReason, GenerationRequest, TokenEvent, TokenLogprob
from engine.text import TextStream, Tokenizer


class Completion:
    """Finished when the engine says so, or as soon as a stop string stands in the text: then the caller aborts the rest."""

    def __init__(self, wanted: GenerationRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.wanted = wanted
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._stream: TextStream | None = tokenizer.stream() if tokenizer is not None and wanted.sampling.stop else None
        self._streamed = ""
        self._stop_string: str | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: TokenEvent | None = None
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.wanted.request_id

    @property
    def is_finished(self) -> bool:
        return self._finished_s is not None

    def take(self, event: TokenEvent) -> None:
        """Take over one event of the engine."""
        if event.token_ids and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs or []
        self._last = event
        self._look_for_stop(event.token_ids)
        if event.finish_reason is not None or self._stop_string is not None:
            self._finished_s = time.monotonic()

    def _look_for_stop(self, token_ids: list[int]) -> None:
        if self._stream is None:
            return
        searched = len(self._streamed)
        self._streamed += "".join(self._stream.push(token_id) for token_id in token_ids)
        hits = []
        for stop in self.wanted.sampling.stop:
            position = self._streamed.find(stop, max(0, searched - len(stop) + 1))
            if position >= 0:
                hits.append((position, stop))
        if hits:
            position, self._stop_string = min(hits)
            self._streamed = self._streamed[:position]

    def result(self) -> RequestOutput:
        """The finished request. Calling it earlier is a bug."""
        last, finished_s = self._last, self._finished_s
        assert last is not None, f"request {self.request_id} has no event"
        assert finished_s is not None, f"request {self.request_id} is not finished"
        ttft_s = None if self._first_token_s is None else self._first_token_s - self._started_s
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.wanted.prompt_token_ids,
            outputs=[self._output(last)],
            num_cached_tokens=last.num_cached_tokens,
            metrics=RequestMetrics(
                queue_s=last.queue_s,
                ttft_s=ttft_s,
                total_s=finished_s - self._started_s,
                num_preemptions=last.num_preemptions,
            ),
        )

    def _output(self, last: TokenEvent) -> CompletionOutput:
        reason = FinishReason.STOP if self._stop_string is not None else last.finish_reason
        assert reason is not None, f"request {self.request_id} ended without a reason"
        asked = self.wanted.sampling.logprobs is not None
        return CompletionOutput(
            index=0,
            text=self._text(reason),
            token_ids=self._token_ids,
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if asked else None,
            logprobs=[self._named(*pair) for pair in zip(self._token_ids, self._logprobs, strict=True)] if asked else None,
            finish_reason=reason.value,
            stop_reason=self._stop_string or self._stop_token(reason),
            error=last.error,
        )

    def _stop_token(self, reason: FinishReason) -> int | None:
        is_own = reason is FinishReason.STOP and self._token_ids[-1] in self.wanted.sampling.stop_token_ids
        return self._token_ids[-1] if is_own else None

    def _text(self, reason: FinishReason) -> str:
        """Without the stop string or stop token that ended it."""
        if self._tokenizer is None:
            return ""
        if self._stop_string is not None:
            return self._streamed
        ended_by_own_token = self._stop_token(reason) is not None
        return self._tokenizer.decode(self._token_ids[:-1] if ended_by_own_token else self._token_ids)

    def _named(self, token_id: int, entry: TokenLogprob) -> dict[int, Logprob]:
        ranks = {top_id: rank for rank, top_id in enumerate(entry.top_token_ids, start=1)}
        values = {token_id: entry.logprob, **dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))}
        return {
            top_id: Logprob(value, ranks.get(top_id), self._tokenizer.id_to_token(top_id) if self._tokenizer else None)
            for top_id, value in values.items()
        }
