"""Python's garbage collector: frozen objects in a serving process, collectable engines in a program that builds several."""

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
from tests.support.tiny_models import saved_model


def test_objects_alive_at_the_start_are_frozen_while_the_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_counts: list[int] = []
    monkeypatch.setattr(main, "build_engine", mock.MagicMock())
    monkeypatch.setattr(main, "_engine_options", lambda _: None)
    monkeypatch.setattr(main, "serve", lambda *_: freeze_counts.append(gc.get_freeze_count()))
    monkeypatch.setattr(gc, "unfreeze", lambda: freeze_counts.append(0))
    connection: Any = mock.MagicMock()
    before = gc.get_freeze_count()
    assert main.run(connection, argparse.Namespace()) == 0
    assert freeze_counts[0] > before
    assert freeze_counts[1:] == [0], "but is at its end"


def test_a_dropped_engine_is_collected_although_another_one_is_built() -> None:
    """Engines contain cycles: freezing all objects when one is built would keep the weights of dropped ones."""
    directory = saved_model("llama", num_hidden_layers=1, head_dim=16).directory
    frozen = gc.get_freeze_count()
    dropped = []
    for _ in range(2):
        engine = small_engine(directory, dtype="float32", max_num_seqs=2, max_model_len=32, num_kv_blocks=16)
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


def test_cycles_dropped_between_calls_are_collected_while_full_collections_are_rare() -> None:
    """In another process, because this one has frozen its libraries and collects less often."""
    repository = Path(gc_thresholds.__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=repository, capture_output=True, text=True, check=True)
    assert int(ended.stdout) < CALLS
