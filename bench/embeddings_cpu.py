"""Embeddings on the CPU: `LLM.embed` against transformers with mean pooling, an encoder of the shape of MiniLM-L6.

Usage: python -m bench.embeddings_cpu [--texts 256] [--rounds 5] [--threads 1]

The peer gets its texts sorted by length in padded batches of 32, as sentence-transformers batches them. Every round runs one
right after the other, in swapped order every other time; vectors are compared before anything is timed. One JSON row per run
is appended to bench/results/embeddings_cpu.jsonl.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.engine_pairs import environment, time_pairs
from bench.rows import argument_parser, publish, row_header
from engine.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - must see the environment set above
import transformers  # noqa: E402

from engine import LLM  # noqa: E402

SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
VOCAB_SIZE = 30522
PEER_BATCH = 32
LEN_MAX = 256
TOLERANCE = 1e-5

Texts = Sequence[Sequence[int]]


def make_texts(count: int) -> list[list[int]]:
    """Random texts with log-normal lengths around 37 tokens, like sentences and short paragraphs."""
    rng = random.Random(1)
    lens = [min(LEN_MAX, int(rng.lognormvariate(3.6, 0.8)) + 3) for _ in range(count)]
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lens]


def peer_vectors(model: Any, texts: Texts) -> torch.Tensor:
    """Vectors from transformers: padded batches, mean over the mask, normalised to length one."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = torch.empty(len(texts), SHAPE["hidden_size"])
    with torch.inference_mode():
        for first in range(0, len(order), PEER_BATCH):
            batch = order[first : first + PEER_BATCH]
            longest = len(texts[batch[0]])
            ids = torch.tensor([[*texts[i], *[0] * (longest - len(texts[i]))] for i in batch])
            mask = torch.tensor([[1] * len(texts[i]) + [0] * (longest - len(texts[i])) for i in batch])
            states = model(ids, attention_mask=mask).last_hidden_state
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors[batch] = torch.nn.functional.normalize(means, dim=-1)
    return vectors


def measure(count: int, rounds: int, threads: int) -> dict[str, Any]:
    texts = make_texts(count)
    torch.manual_seed(5)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB_SIZE, **SHAPE)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, device="cpu", threads=threads)
    torch.testing.assert_close(torch.tensor(llm.embed(texts)), peer_vectors(model, texts), rtol=0, atol=TOLERANCE)
    pairs = time_pairs(lambda: llm.embed(texts), lambda: peer_vectors(model, texts), rounds)
    ratios = [peer.wall_s / ours.wall_s for ours, peer in pairs]
    num_tokens = sum(map(len, texts))
    return {
        "texts": count,
        "tokens": num_tokens,
        "ratio_median": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "ours_tokens_per_s": round(num_tokens / min(ours.wall_s for ours, _ in pairs), 1),
        "peer_tokens_per_s": round(num_tokens / min(peer.wall_s for _, peer in pairs), 1),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    results = measure(options.texts, options.rounds, options.threads)
    row = {
        **row_header("embeddings_cpu"),
        **environment(options.threads),
        "peer": "transformers, padded batches of 32",
        **results,
    }
    publish(row, options)


if __name__ == "__main__":
    main()
