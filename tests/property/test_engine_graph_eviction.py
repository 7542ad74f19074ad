"""Eviction of captured steps: frequent steps have a graph in the end, and rare ones evict none of them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.graph_eviction import WINDOW, WORTH, GraphEviction
from engine.step_sizes import decode_graphs_kept, logits_size, step_size, verify_size

SEATS = 256
USUAL, RARE = ("greedy", "drawn"), ("weighs", "counts", "scores 1", "scores 8")


class Steps:
    """Decode steps of an engine, computed by the graph of their size and kind or by the one that ends with the logits."""

    def __init__(self, seats: int, num_places: int, *, seed: int = 0) -> None:
        self.places = GraphEviction(num_places)
        self.captures = self.ended_with_logits = 0
        self._seats = seats
        self._numbers = random.Random(seed)
        self._num_rows = 1

    def step(self, num_rows: int, kind: str) -> None:
        key: Hashable = step_size(num_rows, self._seats), kind
        if not self.places.admits(key):
            key = logits_size(num_rows, self._seats), None
            self.ended_with_logits += 1
        if key not in self.places:
            self.captures += 1
            given_up = self.places.evict_if_full()
            assert given_up not in self.places
            self.places.add(key, evicted=given_up)
        self.places.record_use(key)

    def walk(self, num_steps: int, kinds: Sequence[str]) -> tuple[int, int]:
        """As requests begin and end, mostly one at a time: captures of these steps, and how many ended with their logits."""
        self.captures = self.ended_with_logits = 0
        numbers, stride = self._numbers, self._seats / SEATS
        for _ in range(num_steps):
            moved = numbers.choice((-1, 0, 0, 0, 1)) if numbers.random() < 0.98 else numbers.randint(-40, 40)
            self._num_rows = max(1, min(self._seats, self._num_rows + round(stride * moved)))
            self.step(self._num_rows, numbers.choice(kinds))
        return self.captures, self.ended_with_logits


@pytest.mark.parametrize("seats", [1, 8, 64, 256, 512, 1024, 4096])
def test_greedy_and_drawn_steps_of_every_size_have_a_graph_each(seats: int) -> None:
    steps = Steps(seats, decode_graphs_kept(seats, 0))
    first, some_ended_with_logits = steps.walk(20_000, USUAL)
    then, others_did = steps.walk(20_000, USUAL[1:])
    assert first + then <= 2 * len({step_size(number, seats) for number in range(1, seats + 1)})
    assert some_ended_with_logits == others_did == 0


def test_what_is_one_step_in_ten_leaves_the_others_their_graphs() -> None:
    kinds = [*USUAL * 18, *RARE]
    steps = Steps(SEATS, decode_graphs_kept(SEATS, 0))
    steps.walk(60_000, kinds)
    captures, ended_with_logits = steps.walk(60_000, kinds)
    assert captures < 30
    assert ended_with_logits < 0.15 * 60_000, "one in ten, and of the others those whose sizes are seldom met"


def test_six_kinds_alike_do_not_drive_each_other_out() -> None:
    steps = Steps(SEATS, decode_graphs_kept(SEATS, 0))
    captures, _ = steps.walk(20_000, USUAL + RARE)
    assert captures < 110
    captures, ended_with_logits = steps.walk(20_000, USUAL + RARE)
    assert captures < 20
    assert ended_with_logits < 0.65 * 20_000, "of 210 sizes and kinds, 91 have a place"


def test_when_the_traffic_is_another_one_its_steps_get_the_places() -> None:
    steps = Steps(SEATS, decode_graphs_kept(SEATS, 0))
    steps.walk(20_000, RARE)
    steps.walk(40_000, USUAL)
    captures, ended_with_logits = steps.walk(20_000, USUAL)
    assert captures < 10
    assert ended_with_logits < 0.05 * 20_000


def test_a_place_is_given_to_who_is_met_more_often_though_never_twice_in_a_row() -> None:
    places = GraphEviction(2)
    for key in ("often", "once"):
        places.add(key)
        places.record_use(key)
    misses = 0
    while not places.admits("as often"):
        misses += 1
        places.record_use("often")
    assert misses == WORTH
    assert places.evict_if_full() == "once"


def test_newcomers_that_need_a_place_at_once_do_not_take_it_from_each_other_by_turns() -> None:
    places = GraphEviction(3)
    for key, times in {"often": 1000, "seldom": 10, "once": 1}.items():
        places.add(key)
        for _ in range(times):
            places.record_use(key)
    captures = 0
    for key in ("newcomer", "another") * 50:
        if key not in places:
            captures += 1
            places.add(key, evicted=places.evict_if_full())
        places.record_use(key)
    assert captures == 2
    assert "often" in places


def test_what_was_met_long_ago_counts_no_more() -> None:
    places = GraphEviction(1)
    places.add("old")
    for _ in range(WINDOW // 2):
        places.record_use("old")
    admitted = [number for number in range(1, 2 * WINDOW) if places.admits("new")]
    assert WORTH < admitted[0] < 2 * WINDOW
    assert places.evict_if_full() == "old"


@given(num_places=st.integers(1, 4), keys=st.lists(st.integers(0, 8), max_size=300))
def test_places_are_never_more_than_there_are(num_places: int, keys: list[int]) -> None:
    places = GraphEviction(num_places)
    held: set[Hashable] = set()
    for key in keys:
        assert places.admits(key) is (key in held or len(held) < num_places), "too few uses to take a place"
        if key not in places:
            given_up = places.evict_if_full()
            assert (given_up in held) is (len(held) == num_places)
            held.discard(given_up)
            places.add(key, evicted=given_up)
            held.add(key)
        places.record_use(key)
        assert len(places) == len(held) <= num_places
        assert all(each in places for each in held)


@given(num_rows=st.integers(1, 4096), more=st.integers(0, 64))
def test_sizes_hold_the_rows_and_never_fall(num_rows: int, more: int) -> None:
    for size in (step_size, logits_size, verify_size):
        assert num_rows <= size(num_rows, 5000) <= size(num_rows + more, 5000)
        assert size(num_rows, num_rows) == num_rows, "no larger than there are seats"
        assert size(size(num_rows, 5000), 5000) == size(num_rows, 5000)
    assert logits_size(num_rows, 5000) >= step_size(num_rows, 5000)
    assert num_rows < 128 or step_size(num_rows, 5000) <= num_rows * 17 / 16
