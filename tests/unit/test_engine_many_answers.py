"""The cost of many answers to one long prompt: token lists, hashes, and prompt tokens reused per step are counted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from engine.protocol import TokenEvent
from engine.sampling.columns import ColumnSampler
from engine.scheduling import admission, prefix_cache
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.support.engines import generation_request, tokens
from tests.support.fake_runner import FakeRunner, engine_over
from tests.support.sampling import sampling_request
from tests.support.scheduling import apply_outputs, drain, make_request, make_scheduler, step


def _add_with_forks(scheduler: Scheduler, num_forks: int, num_prompt_tokens: int) -> tuple[Request, list[Request]]:
    first = make_request("a", num_prompt_tokens)
    forks = [make_request("a", num_prompt_tokens, index=index + 1, forked_from=first) for index in range(num_forks)]
    scheduler.add(first)
    for fork in forks:
        scheduler.add(fork)
    return first, forks


def test_waiting_answers_share_one_token_list_until_they_generate() -> None:
    runner = FakeRunner()
    runner.move = lambda moves: None  # type: ignore[method-assign]
    engine = engine_over(runner)
    engine.submit(generation_request("a", [1, 2, 3], n=3, max_tokens=2))
    answers = list(engine._live["a"])
    assert len({id(answer.token_ids) for answer in answers}) == 1
    events: dict[str, list[TokenEvent]] = {"a": []}
    while engine.has_requests:
        events["a"] += engine.step()
    assert [tokens([event for event in events["a"] if event.index == index]) for index in range(3)] == [[5, 5]] * 3
    assert [answer.token_ids for answer in answers] == [[1, 2, 3, 5, 5]] * 3


def test_the_token_list_of_a_single_answer_is_not_copied() -> None:
    engine = engine_over(FakeRunner())
    engine.submit(generation_request("a", [1, 2, 3], max_tokens=2))
    (answer,) = engine._live["a"]
    before = answer.token_ids
    engine.step()
    assert answer.token_ids is before


@pytest.mark.parametrize("num_prompt_tokens", [63, 64, 65])
def test_a_prompt_is_hashed_once_for_all_answers(num_prompt_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(code: str, ids: Iterable[int]) -> array[int]:
        made = array(code, ids)
        hashed.append(len(made))
        return made

    monkeypatch.setattr(prefix_cache, "array", counted)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=16, budget=128, caches=True)
    first, forks = _add_with_forks(scheduler, 12, num_prompt_tokens)
    apply_outputs(scheduler, scheduler.schedule())
    apply_outputs(scheduler, scheduler.schedule())
    assert sum(hashed) <= num_prompt_tokens
    num_full = num_prompt_tokens // 4
    assert {tuple(fork.block_hashes[:num_full]) for fork in forks} == {tuple(first.block_hashes[:num_full])}
    drain(scheduler)


def test_a_fork_extends_shared_hashes_with_its_own_tokens() -> None:
    """Hashes are equal whether taken over from the first answer or computed."""
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, budget=64, caches=True)
    first, (fork,) = _add_with_forks(scheduler, 1, 18)
    plain = make_request("b", 18)
    cache = PrefixCache(BlockPool(8), 4)
    cache.hashes(first, 4)
    cache.hashes(fork, 2)
    for request, token_id in ((first, 1), (fork, 2), (plain, 2)):
        request.token_ids += [token_id] * 10
    hashes = [cache.hashes(request, 7) for request in (first, fork, plain)]
    assert hashes[1] == hashes[2]
    assert hashes[0][:4] == hashes[1][:4]
    assert hashes[0][4] != hashes[1][4]


def test_a_late_fork_shares_no_hashes_beyond_the_prompt() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, budget=64, caches=True)
    first, (fork,) = _add_with_forks(scheduler, 1, 6)
    plain = make_request("b", 6)
    for request, token_id in ((first, 1), (fork, 2), (plain, 2)):
        request.token_ids += [token_id] * 10
    cache = PrefixCache(BlockPool(8), 4)
    hashes = [cache.hashes(request, 4) for request in (first, fork, plain)]
    assert hashes[1] == hashes[2] != hashes[0]


def test_a_step_starts_forks_of_a_long_prompt_only_up_to_the_limit_of_reused_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REUSED_TOKENS_PER_STEP", 50)
    monkeypatch.setattr(admission, "SHORT_TOKENS", 16)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=16, budget=64)
    _add_with_forks(scheduler, 7, 20)
    other = make_request("b", 8, tenant="bob")
    num_started = []
    while scheduler.has_requests:
        batch = scheduler.schedule()
        num_started.append(sum(item.request.forked_from is not None for item in batch.prefills))
        apply_outputs(scheduler, batch)
        if len(num_started) == 1:
            scheduler.add(other)
        if len(num_started) == 2:
            assert other.num_computed_tokens == 8, "a request waited for forks of another tenant"
    assert num_started[:5] == [0, 2, 2, 2, 1]


def test_a_step_takes_prompts_from_the_prefix_cache_only_up_to_the_limit_of_reused_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "REUSED_TOKENS_PER_STEP", 50)
    monkeypatch.setattr(admission, "SHORT_TOKENS", 16)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=16, budget=64, caches=True)
    scheduler.add(make_request("first", 20))
    drain(scheduler)
    requests = [make_request(str(index), 20) for index in range(4)]
    for request in requests:
        scheduler.add(request)
    assert [len(step(scheduler).prefills) for _ in range(2)] == [2, 2]
    assert [request.num_cached_tokens for request in requests] == [16] * 4


def test_a_single_prompt_beyond_the_limit_of_reused_tokens_is_still_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REUSED_TOKENS_PER_STEP", 5)
    monkeypatch.setattr(admission, "SHORT_TOKENS", 16)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=16, budget=64)
    _, forks = _add_with_forks(scheduler, 3, 20)
    drain(scheduler)
    assert [fork.num_cached_tokens for fork in forks] == [19] * 3


def test_a_long_prompt_is_deferred_by_the_limit_of_reused_tokens_for_one_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "REUSED_TOKENS_PER_STEP", 50)
    monkeypatch.setattr(admission, "SHORT_TOKENS", 16)
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=16, budget=64, caches=True)
    for index in range(4):  # alice decodes, and is above her share
        scheduler.add(make_request(f"a{index}", 4, max_tokens=200, tenant="alice"))
    long = make_request("long", 60, tenant="alice")
    for number in range(20):
        scheduler.add(make_request(f"b{number}", 12, max_tokens=1, tenant="bob"))
        if number == 5:
            scheduler.add(long)
        step(scheduler)
        if long.num_computed_tokens:
            break
    assert number == 6, "put off when it came, and started in the next step"


def test_a_recomputed_prompt_is_shared_only_after_its_step_has_succeeded() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=4)
    first, (fork,) = _add_with_forks(scheduler, 1, 3)
    other = make_request("b", 1)
    scheduler.add(other)
    step(scheduler)
    scheduler.preempt(first)
    scheduler.abort(other)
    under_way = scheduler.advance(scheduler.schedule())
    assert (under_way.requests, first.num_unknown_tokens) == ([first], 1)
    (chunk,) = scheduler.schedule().prefills
    assert (chunk.request, chunk.start) == (fork, 0), "the step that computes the prompt may fail"


def test_penalties_count_the_prompt_of_many_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_lens: list[int] = []

    plain: Any = np.unique

    def unique(ids: Any, **options: bool) -> Any:
        sorted_lens.append(len(ids))
        return plain(ids, **options)

    prompt = tuple(range(10)) * 20
    first = sampling_request("a", prompt=prompt, output=(3,), presence_penalty=1.0, n=4)
    forks = [sampling_request("a", prompt=prompt, output=(3, 11, 3), presence_penalty=1.0, n=4) for _ in range(3)]
    for fork in forks:
        fork.forked_from = first
    sampler = ColumnSampler(4, 20, torch.device("cpu"))
    monkeypatch.setattr("engine.sampling.columns.np.unique", unique)
    for slot, request in enumerate((first, *forks)):
        sampler.assign([slot], [request])
        sampler.restart(slot, request, request.num_tokens)
    assert sum(sorted_lens) <= len(prompt) + 4 * 20
    expected = [[3 if token == 3 else 1 if token < 10 else 0 for token in range(20)]]
    expected += [[5 if token == 3 else 3 if token == 11 else 1 if token < 10 else 0 for token in range(20)]] * 3
    assert sampler.columns.counts.tolist() == expected
