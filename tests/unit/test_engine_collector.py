"""Python's garbage collector with engines: frozen in a serving process, active in a program that builds many."""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine import main
from engine.offline import gc_thresholds
from tests.support.engines import small_engine
from tests.support.tiny_models import make_model


def test_what_a_serving_process_has_at_its_start_is_not_collected_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(main, "build_engine", mock.MagicMock())
    monkeypatch.setattr(main, "_engine_options", lambda _: None)
    monkeypatch.setattr(main, "serve", lambda *_: seen.append(gc.get_freeze_count()))
    monkeypatch.setattr(gc, "unfreeze", lambda: seen.append(0))
    connection: Any = mock.MagicMock()
    before = gc.get_freeze_count()
    assert main.run(connection, argparse.Namespace()) == 0
    assert seen[0] > before
    assert seen[1:] == [0], "but is at its end"


def test_an_engine_that_a_program_drops_is_collected_when_it_builds_another(tmp_path: Path) -> None:
    """Engines have cycles: freezing what is there when one is built would keep its weights for ever."""
    make_model("llama", tmp_path / "model", num_hidden_layers=1, head_dim=16)
    frozen = gc.get_freeze_count()
    dropped = []
    for _ in range(2):
        engine = small_engine(tmp_path / "model", dtype="float32", max_num_seqs=2, max_model_len=32, num_kv_blocks=16)
        dropped.append(weakref.ref(engine.runner))
        engine.close()
        del engine
    gc.collect()
    assert [found() for found in dropped] == [None, None]
    assert gc.get_freeze_count() <= frozen


CALLS = 1200
SCRIPT = f"""
import gc, weakref
from collections import deque
from engine.offline.gc_thresholds import rare_full_collections

class Cycle:
    def __init__(self):
        self.itself = self

dropped, latest = [], deque(maxlen=30)
for _ in range({CALLS}):
    with rare_full_collections():
        made = [[] for _ in range(2000)]
    latest.append(Cycle())
    dropped.append(weakref.ref(latest[-1]))
    del made
print(sum(found() is not None for found in dropped))
"""


def test_cycles_that_a_script_drops_between_its_calls_are_found_however_often_it_calls() -> None:
    """In a process of its own: in this one the libraries are frozen, and collections rarer."""
    repository = Path(gc_thresholds.__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=repository, capture_output=True, text=True, check=True)
    assert int(ended.stdout) < CALLS
