"""Executes the PTX of kernels without a GPU: one Triton per process compiles for an H200, which is emulated.

That is the oldest supported Triton, which the GPU machine has; `GATEHOUSE_PTX_TRITON` selects another. Kernels that the same
process interprets have no PTX, so run this folder by itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import triton_versions
from tests.support.required_parts import is_required
from tests.support.triton_jobs import locked_versions

if TYPE_CHECKING:
    from tests.support.ptx.card import EmulatedCard

VERSION = os.environ.get("GATEHOUSE_PTX_TRITON", locked_versions()[0])
FOUND = triton_versions.find(VERSION)
IS_LATE = "triton" in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
CARDS: list[EmulatedCard] = []

if FOUND is None:
    assert not is_required("triton"), f"Triton {VERSION} is not on this machine; `python3 installer test` installs it"
    collect_ignore_glob = ["test_*.py"]
elif not IS_LATE:
    if FOUND.folder is not None:
        sys.path.insert(0, str(FOUND.folder))
    CACHE = tempfile.TemporaryDirectory(prefix="gatehouse-ptx-")  # its binaries run on no card
    atexit.register(CACHE.cleanup)
    os.environ["TRITON_CACHE_DIR"] = CACHE.name
    from engine.environment import prepare_environment
    from kernels.triton.launching import card_properties, early_launch
    from tests.support.ptx.block import LOCKSTEP
    from tests.support.ptx.card import MULTIPROCESSORS, clear_programs, install

    prepare_environment()
    CARDS.append(install())
    replaced: tuple[tuple[Any, str, Any], ...] = (  # as on an H200, replaced before other modules import them
        (card_properties, "multiprocessors", lambda _: MULTIPROCESSORS),
        (early_launch, "early_launch", lambda *_: {"EARLY": True, "launch_pdl": True}),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)


@pytest.fixture(autouse=True)
def card() -> Iterator[EmulatedCard]:
    """The emulated card that all launches of this folder go to."""
    if not CARDS:
        pytest.skip("kernels are interpreted in this process: run tests/ptx by itself")
    yield CARDS[0]
    CARDS[0].order, CARDS[0].transform_ptx, CARDS[0].adds_waits, CARDS[0].launches_back_to_back = LOCKSTEP, str, False, False


def pytest_unconfigure() -> None:
    """Release the parsed programs, a million objects: at its end pytest collects garbage five times."""
    if CARDS:
        clear_programs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the test that checks what all others have executed last."""
    items.sort(key=lambda item: item.path.name == "test_every_kernel.py")
