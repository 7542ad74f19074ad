"""The code that serves on a GPU, on a card that is rehearsed: its tokens are those of the plain runner on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import run_to_end, small_engine, tokens, wanted
from tests.support.tiny_models import make_model

pytest.importorskip("triton")

from tests.support.rehearsal import Schedule, rehearsal

# The interpreter of Triton 3.6 turns the bounds of a loop into integers in a way that numpy will refuse one day.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is rehearsed"),
]

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 32, "num_kv_blocks": 8, "max_num_batched_tokens": 16}
PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model("llama", folder, num_hidden_layers=1, head_dim=16)
    return folder


def answers(model: Path, **options: Any) -> dict[str, list[int]]:
    engine = small_engine(model, dtype="float32", **{**SMALL, **options})
    events = run_to_end(engine, [wanted(name, prompt, max_tokens=4) for name, prompt in PROMPTS.items()])
    return {name: tokens(each) for name, each in events.items()}


@pytest.mark.parametrize("schedule", list(Schedule))
def test_an_engine_on_the_card_says_what_the_plain_one_says(llama: Path, schedule: Schedule) -> None:
    expected = answers(llama)
    with rehearsal(schedule) as card:
        assert answers(llama, device="cuda") == expected
    assert card.num_captures
    assert card.num_replays
    assert not card.computed_early
