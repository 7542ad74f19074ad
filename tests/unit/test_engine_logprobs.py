"""Log-probabilities of output and prompt: exact, ranked, and computed without a float32 copy of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine.sampling.logprobs
from engine.sampling.logprobs import prompt_logprobs, token_logprobs
from engine.sampling.sampler import Sampler
from tests.support.sampling import next_rows, sample, sampling_request

VOCAB_SIZE = 1100


@pytest.fixture
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(VOCAB_SIZE, generator=generator) * 2


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest new tensor; an input of `logsumexp` counts, because it allocates one of that size."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [] if name in ("slice", "view", "select", "detach") else tree_leaves(result)
        hidden = [args[0]] if name == "logsumexp" else []
        sizes = [leaf.numel() for leaf in [*made, *hidden] if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def test_logprobs_are_computed_before_temperature_bias_and_filters(logits: torch.Tensor) -> None:
    expected = torch.log_softmax(logits.double(), -1)
    request = sampling_request(temperature=0.5, top_k=3, logprobs=4, logit_bias={5: 3.0})
    plain = sampling_request("b", temperature=0.0)
    output, other = sample(logits.expand(2, -1), [request, plain])
    assert output.logprob is not None
    assert output.token_id is not None
    assert other.logprob is None
    top = expected.topk(4)
    assert output.logprob.logprob == pytest.approx(expected[output.token_id].item(), abs=1e-5)
    assert output.logprob.top_token_ids == top.indices.tolist()
    assert output.logprob.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_zero_returns_the_sampled_token_only(logits: torch.Tensor) -> None:
    (output,) = sample(logits[None], [sampling_request(logprobs=0)])
    assert output.logprob is not None
    assert output.logprob.top_token_ids == []


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("num_rows", [1, 3, 10])
def test_prompt_logprobs_equal_a_full_log_softmax(count: int, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.sampling.logprobs, "SLICE_ELEMENTS", 3 * VOCAB_SIZE)
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3
    token_ids = torch.randint(VOCAB_SIZE, (num_rows,), generator=generator).tolist()
    expected = torch.log_softmax(logits.double(), -1)
    entries = prompt_logprobs(logits, token_ids, count)
    for row, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        assert entry.logprob == pytest.approx(expected[row, token_id].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, token_id]).sum())
        assert entry.top_token_ids == expected[row].topk(count).indices.tolist()
        assert entry.top_logprobs == pytest.approx(expected[row].topk(count).values.tolist(), abs=1e-5)


def test_no_tensor_is_larger_than_a_slice_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.sampling.logprobs, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)
    logits = torch.randn(64, VOCAB_SIZE)
    rows = next_rows([sampling_request(str(i), temperature=0.0, logprobs=3) for i in range(64)])
    sampler = Sampler(logits.device)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        prompt_logprobs(logits, list(range(64)), 5)
        token_logprobs(logits, list(range(0, 64, 2)), torch.arange(32), [1] * 32)
        sampler.sample(logits, rows)
    assert VOCAB_SIZE < largest.num_elements <= 4 * VOCAB_SIZE


def test_fewer_alternatives_are_returned_if_the_vocabulary_is_smaller() -> None:
    (entry,) = prompt_logprobs(torch.tensor([[1.0, 2.0, 0.0]]), [2], 20)
    assert (entry.top_token_ids, entry.rank) == ([1, 0, 2], 3)


def test_equally_likely_tokens_share_the_better_rank() -> None:
    (entry,) = prompt_logprobs(torch.zeros(1, 40), [39], 2)
    assert entry.rank == 1
