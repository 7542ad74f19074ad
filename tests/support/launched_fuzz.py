"""An engine whose steps are launched ahead on a fake device without a model, and random scripts of requests for it.

The device has what each slot of each block holds, and draws the next token from all slots of a request up to the last one. A
block that is stale, lost, not yet written or another tenant's therefore changes a token, as it would with a model. A device
that fails leaves garbage behind.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from engine.loop import Engine
from engine.protocol import (
    FinishReason,
    GenerationRequest,
    PlainReason,
    Priority,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from engine.scheduling.drafting import NO_DRAFT, Draft
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.request import UNKNOWN_TOKEN, Request
from engine.scheduling.scheduled_batch import BlockMoves, RowResult, ScheduledBatch, ScheduledRequest, StepOutput
from tests.support.engine_messages import engine_info
from tests.support.engines import unused_grammars
from tests.support.scheduler_fuzz import (
    NUM_ACTIONS,
    STEPS_TO_DRAIN_MAX,
    RandomDrafter,
    SchedulerSetup,
    random_prompt,
    random_setup,
)

VOCAB_SIZE = 12
STOP_TOKEN = 11
GARBAGE = -1


class Content(NamedTuple):
    """What a slot holds: the tenant, the token, and a hash of all tokens up to it."""

    owner: str
    token_id: int
    prefix: int


def extended(prefix: int, token_id: int) -> int:
    """The hash of a prefix with one more token."""
    return GARBAGE if prefix == GARBAGE else hash((prefix, token_id)) & 0x7FFFFFFFFFFFFFFF


def token_after(prefix: int, index: int) -> int:
    """The token that answer `index` of a request has after a prefix."""
    return hash((prefix, index)) % VOCAB_SIZE


def score_after(prefix: int) -> TokenLogprob:
    """The log-probability of whatever token follows a prefix."""
    return TokenLogprob(logprob=-float(prefix % 1009))


def prefix_of(token_ids: Sequence[int]) -> int:
    prefix = 0
    for token_id in token_ids:
        prefix = extended(prefix, token_id)
    return prefix


def expected_answer(submitted: GenerationRequest, index: int) -> list[int]:
    """The tokens of an answer when nothing fails and nothing is aborted."""
    sampling = submitted.sampling
    prefix, answer = prefix_of(submitted.prompt_token_ids), list[int]()
    assert sampling.max_tokens is not None
    while len(answer) < sampling.max_tokens:
        answer.append(token_after(prefix, index))
        prefix = extended(prefix, answer[-1])
        if answer[-1] == STOP_TOKEN and len(answer) >= sampling.min_tokens:
            break
    return answer


class PartlyRightDrafter(RandomDrafter):
    """Drafts of random length that are right up to a random position."""

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        assert UNKNOWN_TOKEN not in request.token_ids, "drafting needs the last token"
        depth = self._rng.choice((0, 0, 0, 1, 2, 3))
        if not depth:
            return NO_DRAFT
        prefix, draft_ids = prefix_of(request.token_ids), list[int]()
        for _ in range(min(depth, limit)):
            is_right = self._rng.random() < 0.7
            draft_ids.append(token_after(prefix, request.index) if is_right else self._rng.randrange(VOCAB_SIZE))
            prefix = extended(prefix, draft_ids[-1])
        return Draft(len(draft_ids), draft_ids)


class FakePendingStep:
    """A launched step, computed already. `stage`: where it fails, if anywhere."""

    def __init__(self, found: list[RowResult], stage: str) -> None:
        self._found = found
        self._stage = stage

    def complete(self) -> None:
        if self._stage == "completion":
            raise RuntimeError("it cannot be completed")

    def outputs(self) -> list[RowResult]:
        if self._stage == "outputs":
            raise RuntimeError("the device failed")
        return self._found

    @property
    def lacks_tokens(self) -> bool:
        return None in self._found


class FakeDevice:
    """An `AheadRunner`. `culprits`: ids of requests that fail however they are computed. `fault_rate`: share of launched
    steps that fail."""

    stage = "run"

    def __init__(self, limits: SchedulerLimits, rng: random.Random, *, is_synchronous: bool, fault_rate: float) -> None:
        self.is_synchronous = is_synchronous
        self.culprits: set[str] = set()
        self._size = limits.block_size
        self.num_wrong_launches = 0  # of batches that no slot can hold, drafts behind a step under way, unnoticed growth
        self._plain_batch: ScheduledBatch | None = None
        self._has_failed_to_move = False
        self._rng = rng
        self._fault_rate = fault_rate
        self._slots: dict[int, Content] = {}
        self._host: dict[int, Content] = {}
        self._last_tokens: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._tables: dict[Request, tuple[Sequence[int], int]] = {}  # of the last launched step, and their sizes

    def move(self, moves: BlockMoves) -> None:
        self._has_failed_to_move = not self._has_failed_to_move and self._rng.random() < self._fault_rate
        for pairs, source, target in (
            (moves.swap_out, self._slots, self._host),
            (moves.swap_in, self._host, self._slots),
            (moves.copies, self._slots, self._slots),
        ):
            for first, second in pairs:
                for offset in range(self._size):
                    content = source.get(first * self._size + offset)
                    if content is not None:
                        target[second * self._size + offset] = content
            if self._has_failed_to_move and self._rng.random() < 0.5:
                break
        if self._has_failed_to_move:
            raise RuntimeError("blocks could not be moved")  # the engine tries again, once

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        assert all(UNKNOWN_TOKEN not in item.request.token_ids for item in items), "the plain runner needs every token"
        if self.culprits & {item.request.request_id for item in items}:
            raise RuntimeError("this request cannot be computed")
        self._tables.clear()
        outputs = self._compute(items, is_garbage=[False] * len(items))
        return [StepOutput([output]) if isinstance(output, int) else output for output in outputs if output is not None]

    def plain_reason(self, batch: ScheduledBatch) -> PlainReason | None:
        is_plain = self._rng.random() < self._fault_rate
        if is_plain:
            self._plain_batch = batch
        return PlainReason.LOGIT_BIAS if is_plain else None

    def launch(self, batch: ScheduledBatch) -> FakePendingStep:
        items, rng = batch.items, self._rng
        is_early = bool(batch.num_draft_tokens) and any(UNKNOWN_TOKEN in item.request.token_ids for item in items)
        self.num_wrong_launches += batch is self._plain_batch or is_early
        stage = rng.choice(("launch", "completion", "outputs", "rows")) if rng.random() < self._fault_rate else ""
        if stage == "launch":
            raise RuntimeError("it cannot be launched")
        self.num_wrong_launches += self._has_grown_unnoticed(batch)
        is_garbage = [
            item.request.request_id in self.culprits or (bool(stage) and (stage != "rows" or rng.random() < 0.3))
            for item in items
        ]
        found = self._compute(items, is_garbage)
        return FakePendingStep([None if bad else output for bad, output in zip(is_garbage, found, strict=True)], stage)

    def invalidate_slots(self) -> None:
        self._last_tokens.clear()
        self._tables.clear()

    def _has_grown_unnoticed(self, batch: ScheduledBatch) -> bool:
        """Whether a runner that has the tables of the last step is not told of all that have grown."""
        before = self._tables
        self._tables = {item.request: (item.request.block_table, len(item.request.block_table)) for item in batch.items}
        if batch.num_draft_tokens:
            self._tables.clear()
            return False
        for request in (item.request for item in batch.decodes):
            table, size = before.get(request, ((), 0))
            if table is request.block_table and size < len(table) and request not in batch.grown:
                return True
        return False

    def _compute(self, items: Sequence[ScheduledRequest], is_garbage: Sequence[bool]) -> list[RowResult]:
        """Compute rows at the same time: none of them reads what another one writes."""
        prefixes = [GARBAGE if bad else self._read(item) for item, bad in zip(items, is_garbage, strict=True)]
        return [self._write(item, prefix) for item, prefix in zip(items, prefixes, strict=True)]

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self._size] * self._size + position % self._size

    def _read(self, item: ScheduledRequest) -> int:
        """The hash of all tokens before the row, if its blocks hold them."""
        prefix = 0
        for position in range(item.start):
            content = self._slots.get(self._slot(item.request, position))
            if content is None or content.owner != item.request.tenant_id:
                return GARBAGE
            prefix = extended(prefix, content.token_id)
            if content.prefix != prefix:
                return GARBAGE
        return prefix

    def _write(self, item: ScheduledRequest, prefix: int) -> RowResult:
        request = item.request
        token_ids = [*request.token_ids[item.start : item.start + item.num_known_tokens], *item.draft_token_ids]
        prefixes: list[int] = []
        for position, token_id in enumerate(token_ids, item.start):
            known = self._last_tokens.get(request, 0) if token_id == UNKNOWN_TOKEN else token_id
            prefix = extended(prefix, known)
            self._slots[self._slot(request, position)] = Content(request.tenant_id, known, prefix)
            prefixes.append(prefix)
        scores = self._prompt_scores(item, prefixes)
        if not item.samples:
            return StepOutput(prompt_logprobs=scores)
        drawn = [token_after(each, request.index) for each in prefixes[len(prefixes) - item.num_draft_tokens - 1 :]]
        num_accepted = 0
        while num_accepted < item.num_draft_tokens and drawn[num_accepted] == item.draft_token_ids[num_accepted]:
            num_accepted += 1
        self._last_tokens[request] = drawn[num_accepted]
        if not item.num_draft_tokens and request.sampling.logprobs is None and not scores:
            return drawn[0]
        ends = prefixes[len(prefixes) - item.num_draft_tokens - 1 :][: num_accepted + 1]
        logprobs = None if request.sampling.logprobs is None else [score_after(each) for each in ends]
        return StepOutput(drawn[: num_accepted + 1], logprobs, scores)

    def _prompt_scores(self, item: ScheduledRequest, prefixes: Sequence[int]) -> list[TokenLogprob] | None:
        """The scores of the prompt tokens that these rows predict."""
        request = item.request
        if request.sampling.prompt_logprobs is None or request.index:
            return None
        return [score_after(each) for each in prefixes[: max(0, request.num_prompt_tokens - 1 - item.start)]]


class LaunchedFuzz:
    """Submits, aborts, preempts and steps in any order; `check` must hold after each."""

    def __init__(
        self,
        setup: SchedulerSetup,
        rng: random.Random,
        *,
        is_synchronous: bool,
        fault_rate: float,
        make_device: Callable[..., FakeDevice] = FakeDevice,
    ) -> None:
        self.rng = rng
        self.setup = setup
        self.now_s = 0.0
        limits = setup.limits
        self.drafter = PartlyRightDrafter(rng) if setup.drafts else None
        self.scheduler = setup.scheduler(lambda: self.now_s, self.drafter)
        self.device = make_device(limits, rng, is_synchronous=is_synchronous, fault_rate=fault_rate)
        info = engine_info(
            max_model_len=limits.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=[STOP_TOKEN], block_size=setup.block_size,
            num_kv_blocks=setup.num_blocks, max_num_seqs=setup.max_num_seqs,
        )  # fmt: skip
        self.engine = Engine(self.scheduler, self.device, info, unused_grammars(), clock=lambda: self.now_s)
        self.meter = setup.meter()
        self._plan = self.scheduler.schedule
        self.scheduler.schedule = self._metered_plan  # type: ignore[method-assign]
        self.submitted: dict[str, GenerationRequest] = {}
        self.delivered: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.starts: dict[tuple[str, int], tuple[int, float]] = {}  # cached tokens, and seconds in the queue
        self.first_token_s: dict[tuple[str, int], float] = {}
        self.scores: dict[tuple[str, int], list[TokenLogprob]] = defaultdict(list)
        self.prompt_scores: dict[tuple[str, int], list[TokenLogprob]] = defaultdict(list)
        self.ended: dict[tuple[str, int], TokenEvent] = {}

    def _metered_plan(self) -> ScheduledBatch:
        batch = self._plan()
        self.meter.charge(batch)
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items)
        assert batch.num_draft_tokens == sum(item.num_draft_tokens for item in batch.items)
        for item in batch.decodes:
            last = item.request.num_tokens + item.num_draft_tokens + 1
            assert last <= item.request.max_total_tokens, "a draft behind the last token"
        last_ones = [item.request for item in batch.decodes if item.request.num_tokens + 1 == item.request.max_total_tokens]
        assert set(batch.ending) == set(last_ones), "the requests whose last token this step samples"
        for item in batch.prefills:
            answer, num_cached = (item.request.request_id, item.request.index), min(item.start, item.request.num_prompt_tokens)
            self.starts.setdefault(answer, (num_cached, self.now_s - item.request.arrived_s))
        return batch

    def submit(self, tenant: int, prompt: list[int], max_tokens: int, *, n: int, min_tokens: int = 0) -> None:
        tenant_id, weight = self.setup.tenants[tenant % len(self.setup.tenants)]
        rng, name = self.rng, str(len(self.submitted))
        weight = rng.choice((1, 2, 4)) if rng.random() < 0.05 else weight
        if rng.random() < 0.03:
            self.device.culprits.add(name)
        request = GenerationRequest(
            request_id=name,
            tenant_id=tenant_id,
            weight=weight,
            priority=rng.choice(list(Priority)) if rng.random() < 0.2 else Priority.STANDARD,
            queue_deadline_s=self.now_s + rng.randint(0, 20) if rng.random() < 0.1 else None,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0,
                seed=1,
                max_tokens=max_tokens,
                n=n,
                min_tokens=min_tokens,
                logprobs=0 if rng.random() < 0.2 else None,
                prompt_logprobs=0 if rng.random() < 0.2 else None,
            ),
        )
        self.submitted[name] = request
        assert self.engine.submit(request) == []

    def next_turn(self) -> None:
        """Submit a chat turn: a request of the same tenant whose prompt continues an answer that has ended."""
        answered = [(self.submitted[name], index) for name, index in self.ended]
        if not answered:
            return
        previous, index = self.rng.choice(answered)
        text = previous.prompt_token_ids + self.delivered[previous.request_id, index]
        prompt = [*text, *(self.rng.randrange(STOP_TOKEN) for _ in range(self.rng.randint(1, 3)))]
        max_tokens = min(self.rng.choice((1, 3, 20)), self.setup.limits.max_model_len - len(prompt))
        if max_tokens > 0:
            self.submit([name for name, _ in self.setup.tenants].index(previous.tenant_id), prompt, max_tokens, n=1)

    def preempt(self) -> None:
        running = [request for request in self.scheduler.running if request.block_table]
        if running:
            self.scheduler.preempt(self.rng.choice(running))

    def abort(self) -> None:
        live = list(self.scheduler.live())
        if live:
            request = self.rng.choice(live)
            if self.rng.random() < 0.5:
                self.record(self.engine.abort(request.request_id))
            else:
                self.record(self.engine.abort_answer(request.request_id, request.index))

    def step(self) -> None:
        self.now_s += 1.0
        self.record(self.engine.step())

    def record(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            answer = event.request_id, event.index
            assert answer not in self.ended, "an event after the last one"
            if event.token_ids:
                self.first_token_s.setdefault(answer, self.now_s)
            self.delivered[answer] += event.token_ids
            self.scores[answer] += event.logprobs or []
            self.prompt_scores[answer] += event.prompt_logprobs or []
            assert event.num_output_tokens == len(self.delivered[answer])
            if event.finish_reason is not None:
                self.ended[answer] = event
                self._check_answer(self.submitted[event.request_id], event)

    def _check_answer(self, submitted: GenerationRequest, last: TokenEvent) -> None:
        found, expected = self.delivered[last.request_id, last.index], expected_answer(submitted, last.index)
        assert found == expected[: len(found)], f"answer {last.index} of {last.request_id} has other tokens"
        self._check_scores(submitted, last)
        assert (last.num_cached_tokens, last.queue_s) == self.starts.get((last.request_id, last.index), (0, 0.0))
        if last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert found == expected, "an answer ended early"
            is_stopped = found[-1] == STOP_TOKEN and len(found) >= submitted.sampling.min_tokens
            assert last.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
            assert last.num_prompt_tokens_computed == len(submitted.prompt_token_ids)
            assert last.decode_s == self.now_s - self.first_token_s[last.request_id, last.index]
        elif last.finish_reason is FinishReason.ERROR:
            assert last.request_id in self.device.culprits
            assert last.error == "the engine failed while computing this request: RuntimeError: this request cannot be computed"
            assert last.error_param is None
        elif last.finish_reason is FinishReason.DEADLINE:
            assert not found

    def _check_scores(self, submitted: GenerationRequest, last: TokenEvent) -> None:
        """Check that each token has exactly one score, even if it was computed more than once."""
        answer, prompt, sampling = (last.request_id, last.index), submitted.prompt_token_ids, submitted.sampling
        text = prompt + self.delivered[answer]
        scores = [score_after(prefix_of(text[:end])) for end in range(1, len(text))]
        assert self.scores[answer] == ([] if sampling.logprobs is None else scores[len(prompt) - 1 :])
        has_scored = sampling.prompt_logprobs is not None and not last.index
        num_scored = min(last.num_prompt_tokens_computed, len(prompt) - 1) if has_scored else 0
        assert self.prompt_scores[answer] == scores[:num_scored]

    def check(self) -> None:
        self.engine.check_invariants()
        totals, step = self.scheduler.totals, self.scheduler.accounts.step
        assert totals.generation_tokens == sum(map(len, self.delivered.values()))
        for request in self.scheduler.live():
            assert request.num_output_tokens == len(self.delivered[request.request_id, request.index])
        assert not self.device.num_wrong_launches
        assert self.scheduler.accounts.aggregate.service_at(step) == sum(self.meter.service.values())
        for account in self.scheduler.accounts:
            assert account.service_at(step) == self.meter.service[account], f"{account.tenant_id} was charged otherwise"
        if self.drafter is not None:
            assert totals.accepted_draft_tokens <= self.drafter.num_accepted

    def drain(self) -> None:
        """Step until idle: every answer must end, and every block must be free."""
        for _ in range(STEPS_TO_DRAIN_MAX):
            if not self.engine.has_requests:
                break
            self.step()
            self.check()
        assert not self.engine.has_requests, "a request starves"
        self.engine.check_when_idle()
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.accounts.aggregate.num_decoding == 0
        if self.drafter is not None:
            rejected = sum(event.num_rejected_draft_tokens for event in self.ended.values())
            assert rejected == self.drafter.num_drafted - self.drafter.num_accepted
        assert self.scheduler.totals.preemptions == sum(event.num_preemptions for event in self.ended.values())
        prompt_tokens = 0
        for name, submitted in self.submitted.items():
            assert all((name, index) in self.ended for index in range(submitted.sampling.num_answers))
            computed = self.ended[name, 0].num_prompt_tokens_computed
            if computed == len(submitted.prompt_token_ids):
                prompt_tokens += computed
        assert self.scheduler.totals.prompt_tokens == prompt_tokens, "a prompt counts once, when it is complete"


def run_launched_script(seed: int, *, make_device: Callable[..., FakeDevice] = FakeDevice) -> LaunchedFuzz:
    """Run one random script to its end."""
    rng = random.Random(seed)
    setup = replace(random_setup(rng), global_prefix=())
    is_synchronous, fault_rate = rng.random() < 0.3, rng.choice((0.0, 0.0, 0.1, 0.4))
    fuzz = LaunchedFuzz(setup, rng, is_synchronous=is_synchronous, fault_rate=fault_rate, make_device=make_device)
    longest = setup.limits.max_model_len
    for _ in range(NUM_ACTIONS):
        action = rng.random()
        if action < 0.35 and longest > 1 and len(fuzz.submitted) - len(fuzz.ended) < 40:
            length = rng.randint(1, longest - 1) if rng.random() < 0.3 else rng.randint(1, max(1, longest // 4))
            max_tokens = min(longest - length, rng.choice((1, 2, 3, 5, 20, longest)))
            min_tokens = rng.choice((0, 0, 0, min(3, max_tokens)))
            num_answers = rng.choice((1, 1, 1, 2, 3))
            fuzz.submit(rng.randrange(64), random_prompt(rng, length), max_tokens, n=num_answers, min_tokens=min_tokens)
        elif action < 0.38:
            fuzz.abort()
        elif action < 0.41:
            fuzz.preempt()
        elif action < 0.47:
            fuzz.next_turn()
        elif action < 0.472:
            fuzz.record(fuzz.engine.abort_all())
        else:
            fuzz.step()
        fuzz.check()
    fuzz.drain()
    return fuzz


def run_script_of_many_answers(seed: int, *, make_device: Callable[..., FakeDevice] = FakeDevice) -> LaunchedFuzz:
    """Run one script in which most prompts have several short answers, blocks are few and the device fails often."""
    rng = random.Random(seed)
    setup = SchedulerSetup(
        num_blocks=rng.randint(6, 14), block_size=4, max_num_seqs=6, spare_budget=16, caches=rng.random() < 0.5
    )
    fuzz = LaunchedFuzz(setup, rng, is_synchronous=False, fault_rate=0.3, make_device=make_device)
    for _ in range(NUM_ACTIONS):
        action = rng.random()
        if action < 0.35 and len(fuzz.submitted) - len(fuzz.ended) < 20:
            prompt = [rng.randrange(STOP_TOKEN) for _ in range(rng.randint(2, 12))]
            fuzz.submit(rng.randrange(2), prompt, rng.choice((2, 2, 3, 4, 5)), n=rng.choice((1, 2, 3)))
        elif action < 0.40:
            fuzz.abort()
        elif action < 0.42:
            fuzz.preempt()
        elif action < 0.50:
            fuzz.next_turn()
        else:
            fuzz.step()
        fuzz.check()
    fuzz.drain()
    return fuzz
