"""Trains the demo model on one CPU thread within a time budget: `python -m engine.demo.train --help`."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo.chat import Conversation, Turn, answer_text, question_turn
from engine.demo.corpus import Corpus, Mix, build
from engine.demo.muon import Muon
from engine.demo.network import Layer, Network, Shape, num_params
from engine.demo.rows import (
    NO_LOSS,
    batches,
    chat_document,
    load_tokenizer,
    pack,
    prose_document,
    shard,
    tokenizer_texts,
    train_tokenizer,
)

DEFAULT_DOCS = Path("/usr/share/doc/python3.11/html/_sources")


@dataclass(frozen=True)
class Stage:
    """A stretch of training that starts when share_done of the time budget is spent; row_len in tokens."""

    share_done: float
    row_len: int
    mix: Mix


STAGES = (
    Stage(0.0, 256, Mix(chat_share=0.65, written_share=0.24)),
    Stage(0.22, 256, Mix(chat_share=0.7, written_share=0.32, focused=True)),
    Stage(0.82, 1024, Mix(chat_share=0.85, written_share=0.45, focused=True)),
)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, apart from its shape. Shares are of tokens, lengths in tokens, times in seconds."""

    seed: int = 7
    minutes: float = 110.0
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 150
    batch_tokens: int = 4096
    stages: tuple[Stage, ...] = STAGES
    checkpoint_s: float = 300.0
    validate_s: float = 600.0


@dataclass
class Progress:
    """The progress of a run; saved in every checkpoint. elapsed_s counts training time only."""

    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0
    shard_idx: int = 0
    batch_idx: int = 0
    train_loss: float = math.nan


def lr_fraction(settings: Settings, step: int, share_done: float) -> float:
    """The fraction of the peak learning rates to use: linear warm-up, then linear decay to zero over the time budget."""
    return min((step + 1) / settings.warmup_steps, 1.0) * max(1.0 - share_done, 0.004)


def optimizers_for(network: Network, settings: Settings) -> dict[str, torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings and the norms."""
    layers = [layer for layer in network.layers if isinstance(layer, Layer)]
    shape = network.shape
    groups: list[dict[str, Any]] = [
        {"params": [layer.qkv.weight for layer in layers], "heights": list(shape.qkv_sizes)},
        {"params": [layer.gate_up.weight for layer in layers], "heights": [shape.intermediate_size] * 2},
        {"params": [weight for layer in layers for weight in (layer.out.weight, layer.down.weight)]},
    ]
    rest = [weight for name, weight in network.named_parameters() if weight.dim() == 1 or name.startswith("embed.")]
    adamw = torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return {"muon": Muon(groups, settings.muon_lr, decay=settings.weight_decay), "adamw": adamw}


@torch.no_grad()
def mean_loss(network: Network, rows: Tensor) -> tuple[float, int]:
    """(nats per target token, number of target tokens) over packed rows."""
    total, count = 0.0, 0
    for ids, targets in batches(rows, 8, 0):
        with torch.autocast("cpu", torch.bfloat16):
            total += float(network(ids, targets))
        count += int((targets != NO_LOSS).sum())
    return total / max(count, 1), count


class Validation:
    """Prose of held-out pages (bits per byte); answers never asked for in training, and known ones (nats per token).

    Pages and facts are held out separately, so neither is entirely unseen: a held-out fact's page may have been read, and vice
    versa.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, row_len: int) -> None:
        rng = random.Random(1)
        known = [f for f in corpus.facts if f.page == "library/functions"]
        self.prose_bytes = 0
        prose = []
        for passage in corpus.val:
            prose.append(prose_document(tokenizer, passage.text))
            self.prose_bytes += len(passage.text)
        self.prose_tokens = sum(len(d.ids) - 1 for d in prose)
        self.rows = {
            "prose": pack(prose, row_len),
            "new_facts": pack([_single_turn(tokenizer, question_turn(f, rng)) for f in corpus.val_facts], row_len),
            "known_facts": pack(
                [_single_turn(tokenizer, Turn(f"What is {f.subject}?", answer_text(f))) for f in known], row_len
            ),
        }

    def measure(self, network: Network) -> dict[str, float]:
        losses = {name: mean_loss(network, rows)[0] for name, rows in self.rows.items()}
        losses["bits_per_byte"] = losses["prose"] / math.log(2) * self.prose_tokens / self.prose_bytes
        return {name: round(value, 4) for name, value in losses.items()}


def _single_turn(tokenizer: Tokenizer, turn: Turn) -> Any:
    return chat_document(tokenizer, Conversation("", (turn,)))


class Run:
    """One training run in one directory: network, optimizer, progress, checkpoint."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, shape: Shape, settings: Settings, directory: Path) -> None:
        torch.manual_seed(settings.seed)
        self.corpus, self.tokenizer, self.settings, self.directory = corpus, tokenizer, settings, directory
        self.network = Network(shape)
        self.optimizers = optimizers_for(self.network, settings)
        self.peak_lrs = {"muon": settings.muon_lr, "adamw": settings.adamw_lr}
        self.progress = Progress()
        self.compiled: Any = self.network
        self.validation = Validation(corpus, tokenizer, settings.stages[0].row_len)

    @property
    def share_done(self) -> float:
        return self.progress.elapsed_s / (self.settings.minutes * 60)

    def save(self) -> None:
        """Writes the checkpoint to a new file and renames it over the old one, so that a kill leaves a complete file."""
        state = {
            "shape": asdict(self.network.shape),
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "network": self.network.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }
        torch.save(state, self.directory / "checkpoint.tmp")
        os.replace(self.directory / "checkpoint.tmp", self.directory / "checkpoint.pt")

    def resume(self) -> bool:
        path = self.directory / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.progress = Progress(**state["progress"])
        return True

    def report(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, **asdict(self.progress), **values}
        with (self.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        shown = " ".join(f"{key}={value}" for key, value in values.items())
        minutes = self.progress.elapsed_s / 60
        eta = max(self.settings.minutes - minutes, 0.0)
        print(
            f"{kind} step={self.progress.step} tokens={self.progress.tokens / 1e6:.2f}M "
            f"min={minutes:.1f} eta_min={eta:.1f} {shown}",
            flush=True,
        )

    def validate(self) -> None:
        self.report("val", **self.validation.measure(self.network))

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """One update; returns the loss in nats per target token."""
        fraction = lr_fraction(self.settings, self.progress.step, self.share_done)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.peak_lrs[name] * fraction
        num_targets = int((targets != NO_LOSS).sum())
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.compiled(ids, targets) / num_targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        return float(loss.detach())

    def training_rows(self) -> tuple[Tensor, int]:
        """Training rows for the current stage, and their batch size."""
        stage = [stage for stage in self.settings.stages if stage.share_done <= self.share_done][-1]
        rows = shard(self.corpus, self.tokenizer, stage.row_len, self.progress.shard_idx, stage.mix, self.settings.seed)
        return rows, self.settings.batch_tokens // stage.row_len

    def train(self) -> None:
        """Train until the budget is spent. Checkpoints and validation happen at time intervals."""
        saved = validated = self.progress.elapsed_s
        while self.share_done < 1.0:
            rows, batch_size = self.training_rows()
            for ids, targets in batches(rows, batch_size, self.progress.batch_idx):
                self._timed_step(ids, targets)
                if self.progress.elapsed_s - saved > self.settings.checkpoint_s:
                    saved = self.progress.elapsed_s
                    self.save()
                if self.progress.elapsed_s - validated > self.settings.validate_s:
                    validated = self.progress.elapsed_s
                    self.validate()
                if self.share_done >= 1.0:
                    break
            self.progress.shard_idx += 1
            self.progress.batch_idx = 0
        self.save()
        self.validate()

    def _timed_step(self, ids: Tensor, targets: Tensor) -> None:
        start_s = time.monotonic()
        loss = self.step(ids, targets)
        progress = self.progress
        step_s = time.monotonic() - start_s
        progress.elapsed_s += step_s
        progress.step += 1
        progress.batch_idx += 1
        progress.tokens += ids.numel()
        progress.train_loss = loss if math.isnan(progress.train_loss) else 0.98 * progress.train_loss + 0.02 * loss
        if progress.step % 50 == 0:
            self.report("train", loss=round(progress.train_loss, 4), tok_s=round(ids.numel() / step_s))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="directory for the tokenizer, checkpoint and log")
    parser.add_argument("--docs", type=Path, default=DEFAULT_DOCS, help="the documentation's .rst.txt sources")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="the .py files to read")
    parser.add_argument("--minutes", type=float, default=Settings.minutes, help="training time, wall clock")
    parser.add_argument("--muon-lr", type=float, default=Settings.muon_lr, help="peak rate of the layers' matrices")
    parser.add_argument("--adamw-lr", type=float, default=Settings.adamw_lr, help="peak rate of everything else")
    parser.add_argument("--layers", type=int, default=Shape.num_hidden_layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden_size)
    parser.add_argument("--inner", type=int, default=Shape.intermediate_size)
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler, 1.2 times as fast")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    args.run.mkdir(parents=True, exist_ok=True)
    corpus = build(args.docs, args.stdlib)
    shape = Shape(hidden_size=args.hidden, num_hidden_layers=args.layers, intermediate_size=args.inner)
    path = args.run / "tokenizer.json"
    if not path.exists():
        train_tokenizer(tokenizer_texts(corpus, seed=0), shape.vocab_size).save(str(path))
    settings = Settings(minutes=args.minutes, muon_lr=args.muon_lr, adamw_lr=args.adamw_lr)
    run = Run(corpus, load_tokenizer(path), shape, settings, args.run)
    resumed = run.resume()
    if args.compile:
        run.compiled = torch.compile(run.network, dynamic=False)
    run.report(
        "start",
        resumed=resumed,
        params=num_params(run.network),
        corpus_bytes=corpus.num_bytes(),
        corpus_sha256=corpus.sha256(),
    )
    run.train()


if __name__ == "__main__":
    main()
