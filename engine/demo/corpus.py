"""Builds the demo model's corpus: prose and conversations from Python's documentation, with a part held out for validation."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from engine.demo.chat import Conversation, ConversationSampler
from engine.demo.facts import Fact, Passage, docs_pages, docstring_facts, page_facts, passages, unique

HELD_OUT_PERCENT = 2


@dataclass(frozen=True)
class Mix:
    """Composition of a portion of training text: the share of conversations among all tokens, the share of hand-written
    material among conversations, and whether facts are drawn broadly or with focus on the well-known ones."""

    chat_share: float
    written_share: float
    focused: bool = False


@dataclass(frozen=True)
class Corpus:
    """Passages come in two lengths, for short and long rows; validation parts are not trained on as such."""

    facts: list[Fact]
    val_facts: list[Fact]
    short: list[Passage]
    long: list[Passage]
    val: list[Passage]

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for fact in [*self.facts, *self.val_facts]:
            digest.update(f"{fact.subject}\0{fact.answer}\0{fact.code}\0".encode())
        for passage in [*self.short, *self.val]:
            digest.update(passage.text.encode())
        return digest.hexdigest()

    def num_bytes(self) -> int:
        return sum(len(f.subject) + len(f.answer) + len(f.code) for f in self.facts) + sum(len(p.text) for p in self.short)


def _held_out(key: str) -> bool:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def _is_for_validation(fact: Fact) -> bool:
    return not fact.page.startswith(("glossary", "tutorial")) and _held_out(fact.subject)


def build(docs: Path, stdlib: Path, short_chars: int = 800, long_chars: int = 3200) -> Corpus:
    """Reads docs (the .rst.txt sources) and the standard library's docstrings. The same input gives the same corpus."""
    pages = list(docs_pages(docs))
    if not pages:
        raise SystemExit(f"no .rst.txt pages below {docs}; install the python3-doc package or pass --docs")
    found = [fact for page, blocks in pages for fact in page_facts(page, blocks)]
    facts = unique([*found, *docstring_facts(stdlib)])
    by_limit = {
        limit: [p for page, blocks in pages for p in passages(page, blocks, limit)] for limit in (short_chars, long_chars)
    }
    return Corpus(
        facts=[f for f in facts if not _is_for_validation(f)],
        val_facts=[f for f in facts if _is_for_validation(f)],
        short=[p for p in by_limit[short_chars] if not _held_out(p.page)],
        long=[p for p in by_limit[long_chars] if not _held_out(p.page)],
        val=[p for p in by_limit[short_chars] if _held_out(p.page)],
    )


def conversations(facts: list[Fact], count: int, max_chars: int, seed: int, mix: Mix) -> list[Conversation]:
    sampler = ConversationSampler(facts, random.Random(seed), mix.written_share, mix.focused)
    return [sampler.conversation(max_chars) for _ in range(count)]
