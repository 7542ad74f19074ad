"""Eviction of captured graphs: frequent step shapes keep their graph, and rare ones do not evict them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.graph_eviction import WINDOW, WORTH, GraphEviction
from engine.step_sizes import decode_graphs_kept, logits_size, step_size, verify_size

MAX_ROWS = 256
FREQUENT, RARE = ("greedy", "drawn"), ("weighs", "counts", "scores 1", "scores 8")


class DecodeSteps:
    """Decode steps that run the graph of their size and kind, or else the graph of their size that ends with the logits."""

    def __init__(self, max_rows: int, num_places: int) -> None:
        self.graphs = GraphEviction(num_places)
        self.captures = self.ended_with_logits = 0
        self._max_rows = max_rows
        self._rng = random.Random(0)
        self._num_rows = 1

    def step(self, num_rows: int, kind: str) -> None:
        key: Hashable = step_size(num_rows, self._max_rows), kind
        if not self.graphs.admits(key):
            key = logits_size(num_rows, self._max_rows), None
            self.ended_with_logits += 1
        if key not in self.graphs:
            self.captures += 1
            given_up = self.graphs.evict_if_full()
            assert given_up not in self.graphs
            self.graphs.add(key, evicted=given_up)
        self.graphs.record_use(key)

    def run_random(self, num_steps: int, kinds: Sequence[str]) -> tuple[int, int]:
        """Run steps whose number of rows changes mostly by one; return the captures and the steps that ended with logits."""
        self.captures = self.ended_with_logits = 0
        rng, stride = self._rng, self._max_rows / MAX_ROWS
        for _ in range(num_steps):
            moved = rng.choice((-1, 0, 0, 0, 1)) if rng.random() < 0.98 else rng.randint(-40, 40)
            self._num_rows = max(1, min(self._max_rows, self._num_rows + round(stride * moved)))
            self.step(self._num_rows, rng.choice(kinds))
        return self.captures, self.ended_with_logits


@pytest.mark.parametrize("max_rows", [1, 8, 64, 256, 512, 1024, 4096])
def test_frequent_kinds_of_every_size_have_a_graph_each(max_rows: int) -> None:
    steps = DecodeSteps(max_rows, decode_graphs_kept(max_rows, 0))
    first, ended_with_logits = steps.run_random(20_000, FREQUENT)
    then, others_did = steps.run_random(20_000, FREQUENT[1:])
    assert first + then <= 2 * len({step_size(number, max_rows) for number in range(1, max_rows + 1)})
    assert ended_with_logits == others_did == 0


def test_rare_kinds_leave_frequent_ones_their_graphs() -> None:
    kinds = [*FREQUENT * 18, *RARE]
    steps = DecodeSteps(MAX_ROWS, decode_graphs_kept(MAX_ROWS, 0))
    steps.run_random(60_000, kinds)
    captures, ended_with_logits = steps.run_random(60_000, kinds)
    assert captures < 30
    assert ended_with_logits < 0.15 * 60_000, "one in ten, and of the others those whose sizes are seldom met"


def test_equally_frequent_kinds_do_not_evict_each_other() -> None:
    steps = DecodeSteps(MAX_ROWS, decode_graphs_kept(MAX_ROWS, 0))
    captures, _ = steps.run_random(20_000, FREQUENT + RARE)
    assert captures < 110
    captures, ended_with_logits = steps.run_random(20_000, FREQUENT + RARE)
    assert captures < 20
    assert ended_with_logits < 0.65 * 20_000, "of 210 sizes and kinds, 91 have a place"


def test_graphs_follow_a_change_of_the_traffic() -> None:
    steps = DecodeSteps(MAX_ROWS, decode_graphs_kept(MAX_ROWS, 0))
    steps.run_random(20_000, RARE)
    steps.run_random(40_000, FREQUENT)
    captures, ended_with_logits = steps.run_random(20_000, FREQUENT)
    assert captures < 10
    assert ended_with_logits < 0.05 * 20_000


def test_a_key_is_admitted_once_it_is_used_about_as_often_as_the_least_used_one() -> None:
    graphs = GraphEviction(2)
    for key in ("often", "once"):
        graphs.add(key)
        graphs.record_use(key)
    misses = 0
    while not graphs.admits("as often"):
        misses += 1
        graphs.record_use("often")
    assert misses == WORTH
    assert graphs.evict_if_full() == "once"


def test_forced_captures_evict_rarely_used_keys_and_not_each_other() -> None:
    graphs = GraphEviction(3)
    for key, times in {"often": 1000, "seldom": 10, "once": 1}.items():
        graphs.add(key)
        for _ in range(times):
            graphs.record_use(key)
    captures = 0
    for key in ("newcomer", "another") * 50:
        if key not in graphs:
            captures += 1
            graphs.add(key, evicted=graphs.evict_if_full())
        graphs.record_use(key)
    assert captures == 2
    assert "often" in graphs


def test_uses_long_ago_no_longer_count() -> None:
    graphs = GraphEviction(1)
    graphs.add("old")
    for _ in range(WINDOW // 2):
        graphs.record_use("old")
    admitted = [number for number in range(1, 2 * WINDOW) if graphs.admits("new")]
    assert WORTH < admitted[0] < 2 * WINDOW
    assert graphs.evict_if_full() == "old"


@given(num_places=st.integers(1, 4), keys=st.lists(st.integers(0, 8), max_size=300))
def test_there_are_never_more_graphs_than_places(num_places: int, keys: list[int]) -> None:
    graphs = GraphEviction(num_places)
    held: set[Hashable] = set()
    for key in keys:
        assert graphs.admits(key) is (key in held or len(held) < num_places), "too few uses to take a place"
        if key not in graphs:
            given_up = graphs.evict_if_full()
            assert (given_up in held) is (len(held) == num_places)
            held.discard(given_up)
            graphs.add(key, evicted=given_up)
            held.add(key)
        graphs.record_use(key)
        assert {each for each in range(9) if each in graphs} == held
        assert len(held) <= num_places


@given(num_rows=st.integers(1, 4096), more=st.integers(0, 64))
def test_sizes_are_at_least_the_rows_monotonic_and_idempotent(num_rows: int, more: int) -> None:
    for size in (step_size, logits_size, verify_size):
        assert num_rows <= size(num_rows, 5000) <= size(num_rows + more, 5000)
        assert size(num_rows, num_rows) == num_rows, "no larger than there are seats"
        assert size(size(num_rows, 5000), 5000) == size(num_rows, 5000)
    assert logits_size(num_rows, 5000) >= step_size(num_rows, 5000)
    assert num_rows < 128 or step_size(num_rows, 5000) <= num_rows * 17 / 16
