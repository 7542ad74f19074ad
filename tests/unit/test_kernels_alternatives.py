"""Kernels that can replace each other: which of them a launch gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.alternatives import (
    CHOICES,
    GEMV,
    HOPPER,
    LONE_ATTENTION,
    ONE_LAUNCH,
    PRODUCTS,
    ROTATION_BEFORE,
    SPLITS,
    TILES,
    alternative_in_force,
    consulted,
    put_in_force,
    serving_product,
)

BYTES = PRODUCTS[8, 1]


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    put_in_force({})
    yield
    put_in_force({})


def test_without_a_decision_the_first_alternative_serves_that_supports_the_launch() -> None:
    assert BYTES.serving(HOPPER, GEMV, TILES) == HOPPER
    assert BYTES.serving(GEMV, TILES) == GEMV


def test_the_alternative_in_force_serves_where_it_supports_the_launch() -> None:
    put_in_force({BYTES.name: TILES})
    assert BYTES.serving(HOPPER, GEMV, TILES) == TILES
    put_in_force({BYTES.name: HOPPER})
    assert BYTES.serving(GEMV, TILES) == GEMV


def test_an_alternative_that_was_passed_over_serves_no_other_launch() -> None:
    put_in_force({BYTES.name: GEMV})
    assert BYTES.serving(HOPPER, TILES) == TILES


@pytest.mark.parametrize(
    ("bits", "num_rows", "limit"), [(8, 1, 1), (8, 2, 8), (8, 8, 8), (8, 9, 16), (8, 16, 16), (4, 1, 1), (4, 7, 8), (4, 10, 16)]
)
def test_products_are_decided_by_bits_and_number_of_rows(bits: int, num_rows: int, limit: int) -> None:
    assert serving_product(bits, num_rows, HOPPER, TILES) == HOPPER
    put_in_force({PRODUCTS[bits, limit].name: TILES})
    assert serving_product(bits, num_rows, HOPPER, TILES) == TILES
    put_in_force({choice.name: TILES for choice in PRODUCTS.values() if choice is not PRODUCTS[bits, limit]})
    assert serving_product(bits, num_rows, HOPPER, TILES) == HOPPER


def test_products_without_alternatives_are_tiled() -> None:
    with consulted() as found:
        assert serving_product(16, 2, TILES) == TILES
        assert serving_product(32, 1, TILES) == TILES
    assert not found


def test_a_decision_replaces_all_earlier_ones() -> None:
    put_in_force({BYTES.name: TILES})
    put_in_force({LONE_ATTENTION.name: SPLITS})
    assert BYTES.serving(GEMV, TILES) == GEMV
    assert LONE_ATTENTION.serving(ONE_LAUNCH, SPLITS, ROTATION_BEFORE) == SPLITS


def test_an_alternative_is_in_force_for_a_block_beside_what_was_decided() -> None:
    put_in_force({LONE_ATTENTION.name: SPLITS})
    with alternative_in_force(BYTES, TILES):
        assert BYTES.serving(GEMV, TILES) == TILES
        assert LONE_ATTENTION.serving(ONE_LAUNCH, SPLITS) == SPLITS
    assert BYTES.serving(GEMV, TILES) == GEMV


def test_what_launches_ask_for_is_noted_with_all_alternatives_that_support_one_of_them() -> None:
    BYTES.serving(HOPPER, GEMV, TILES)
    with consulted() as found:
        BYTES.serving(GEMV, TILES)
        BYTES.serving(TILES)
    BYTES.serving(HOPPER, TILES)
    assert found == {BYTES: {GEMV, TILES}}


def test_products_are_timed_with_as_many_rows_as_are_decided_together() -> None:
    assert all(choice.num_rows == most_rows for (_, most_rows), choice in PRODUCTS.items())


def test_choices_have_names_of_their_own() -> None:
    assert len({choice.name for choice in CHOICES}) == len(CHOICES)
