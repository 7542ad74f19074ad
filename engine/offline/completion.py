"""One request of `LLM` while it runs: collects the events of its answers and becomes a `RequestOutput`. Knows no torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.protocol import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.text.detokenizer import AnswerText
from engine.text.tokenizer import Tokenizer


def engine_params(sampling: SamplingParams) -> SamplingParams:
    """What the engine must compute so that `sampling` can be honoured: ranking and echo need log-probabilities."""
    logprobs, prompt_logprobs = sampling.logprobs, sampling.prompt_logprobs
    if logprobs is None and sampling.num_answers > sampling.n:
        logprobs = 0
    if sampling.echo and sampling.logprobs is not None:
        prompt_logprobs = max(sampling.logprobs, prompt_logprobs or 0)
    return replace(sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


class Answer:
    """One answer of a request. It ends when the engine ends it, or as soon as its text contains a stop string."""

    def __init__(self, text: AnswerText | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last: TokenEvent | None = None
        self.num_accepted_draft_tokens = 0
        self._text = text
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str | None:
        return None if self._text is None else self._text.matched

    def has_ended(self) -> bool:
        return self.last is not None and (self.last.finish_reason is not None or self.stop_string is not None)

    @property
    def cumulative_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.last is not None, "an answer without an event"
        reason = FinishReason.STOP if self.stop_string is not None else self.last.finish_reason
        assert reason is not None, f"answer {self.last.index} of request {self.last.request_id} ended without a reason"
        return reason

    def add_event(self, event: TokenEvent) -> None:
        """Add one event of the engine; tokens after a stop string are dropped."""
        self.last = event
        num_added = self.add_tokens(event.token_ids, ends_by_token=event.finish_reason is FinishReason.STOP)
        self.logprobs += (event.logprobs or [])[:num_added]
        self.num_accepted_draft_tokens += max(0, num_added - 1)

    def add_tokens(self, token_ids: list[int], *, ends_by_token: bool = False) -> int:
        """Add tokens up to the end of a stop string. Returns how many were added."""
        num_added = len(token_ids)
        if self._text is not None:
            piece, num_added = self._text.push(token_ids, ends_by_token=ends_by_token)
            self._pieces.append(piece)
        self.token_ids += token_ids[:num_added]
        return num_added

    def text(self, tokenizer: Tokenizer | None, end_ids: Collection[int]) -> str:
        """Without the stop string or end token that ended it."""
        if tokenizer is None:
            return ""
        if self._text is not None:
            return "".join(self._pieces) + ("" if self.stop_string is not None else self._text.flush())
        ended_by_token = self.finish_reason is FinishReason.STOP and self.token_ids[-1] in end_ids
        return tokenizer.decode(self.token_ids[:-1] if ended_by_token else self.token_ids)


class Completion:
    """A request with all of its answers. `sampling` is what the caller passed, `request.sampling` what the engine computes."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        sampling: SamplingParams,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.request = request
        self._sampling = sampling
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._end_ids = frozenset(sampling.stop_token_ids).union(eos_token_ids if sampling.stops_at_eos else ())
        self._answers = [Answer(self._answer_text()) for _ in range(sampling.num_answers)]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        return self._finished_s is not None

    @property
    def num_prompt_tokens_computed(self) -> int:
        last = self._answers[0].last
        return 0 if last is None else last.num_prompt_tokens_computed

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self._answers)

    def add_event(self, event: TokenEvent) -> bool:
        """Add one event of the engine. True when the caller must abort this answer because its text contains a stop string."""
        answer = self._answers[event.index]
        if answer.has_ended():
            return False
        if event.token_ids and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        if not event.index:
            self._prompt_logprobs += event.prompt_logprobs or []
        answer.add_event(event)
        return self._record_end(answer) and event.finish_reason is None

    def add_token(self, index: int, token_id: int) -> bool:
        """As `add_event`, for an answer that continues with one token, as nearly all answers in a step do."""
        answer = self._answers[index]
        if answer.has_ended():
            return False
        answer.add_tokens([token_id])
        return self._record_end(answer)

    def _record_end(self, answer: Answer) -> bool:
        """Whether the answer has ended. Records the end of the request if all its answers have."""
        has_ended = answer.has_ended()
        if has_ended and all(other.has_ended() for other in self._answers):
            self._finished_s = time.monotonic()
        return has_ended

    def result(self) -> RequestOutput:
        """The finished request. Calling it earlier is a bug."""
        assert self._finished_s is not None, f"request {self.request_id} is not finished"
        events = [answer.last for answer in self._answers if answer.last is not None]
        count = self._sampling.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=None if count is None else [None, *self._prompt_logprob_maps(count)],
            outputs=[self._output(index, answer) for index, answer in enumerate(self._best_answers())],
            num_cached_tokens=events[0].num_cached_tokens,
            metrics=RequestMetrics(
                queue_s=events[0].queue_s,
                ttft_s=None if self._first_token_s is None else self._first_token_s - self._started_s,
                total_s=self._finished_s - self._started_s,
                num_preemptions=sum(event.num_preemptions for event in events),
                num_accepted_draft_tokens=sum(answer.num_accepted_draft_tokens for answer in self._answers),
            ),
        )

    def _answer_text(self) -> AnswerText | None:
        """Only stop strings need the text of an answer while it grows."""
        if self._tokenizer is None or not self._sampling.stop:
            return None
        return AnswerText(
            self._tokenizer.decode,
            stop=self._sampling.stop,
            stop_token_ids=self._end_ids,
            min_tokens=self._sampling.min_tokens,
        )

    def _best_answers(self) -> list[Answer]:
        """The `n` answers with the highest cumulative log-probability, or all in their order. Failed ones come last."""
        if len(self._answers) == self._sampling.n:
            return self._answers
        ranked = sorted(
            self._answers, key=lambda answer: (answer.finish_reason is FinishReason.ERROR, -answer.cumulative_logprob)
        )
        return ranked[: self._sampling.n]

    def _output(self, index: int, answer: Answer) -> CompletionOutput:
        sampling, reason, last = self._sampling, answer.finish_reason, answer.last
        assert last is not None, f"answer {index} of request {self.request_id} has no event"
        logprobs = None
        if sampling.logprobs is not None:
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = [self._logprob_map(token_id, entry, sampling.logprobs) for token_id, entry in pairs]
            if sampling.echo:
                logprobs = [{}, *self._prompt_logprob_maps(sampling.logprobs), *logprobs]
        is_stop_token = reason is FinishReason.STOP and answer.token_ids[-1] in sampling.stop_token_ids
        return CompletionOutput(
            index=index,
            text=self._echoed_text() + answer.text(self._tokenizer, self._end_ids),
            token_ids=(self.request.prompt_token_ids if sampling.echo else []) + answer.token_ids,
            cumulative_logprob=None if self.request.sampling.logprobs is None else answer.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=reason.value,
            stop_reason=answer.stop_string or (answer.token_ids[-1] if is_stop_token else None),
            error=last.error,
            error_param=last.error_param,
        )

    def _echoed_text(self) -> str:
        if not self._sampling.echo or self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self.request.prompt_token_ids) if self._prompt is None else self._prompt

    def _prompt_logprob_maps(self, count: int) -> list[dict[int, Logprob]]:
        """The log-probabilities of every prompt token but the first, and those of the `count` likeliest tokens there."""
        pairs = zip(self.request.prompt_token_ids[1:], self._prompt_logprobs, strict=False)
        return [self._logprob_map(token_id, entry, count) for token_id, entry in pairs]

    def _logprob_map(self, token_id: int, entry: TokenLogprob, count: int) -> dict[int, Logprob]:
        values = {token_id: (entry.logprob, entry.rank)}
        top = zip(entry.top_token_ids[:count], entry.top_logprobs, strict=False)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            values.setdefault(top_id, (logprob, rank))
        return {key: Logprob(logprob, rank, self._token_text(key)) for key, (logprob, rank) in values.items()}

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)
