"""Turns passages and conversations into rows of token ids with targets; owns the tokenizer and the chat format."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from engine.demo.chat import Conversation
from engine.demo.corpus import Corpus, Mix, conversations

BOS, PAD, START, END = "<|begin_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, PAD, START, END)
BOS_ID, PAD_ID, START_ID, END_ID = range(4)
NO_LOSS = -100

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words keep their leading space; digits stand alone, so that counting is learned digit by digit.
_PIECES = r"'(?:s|t|re|ve|m|ll|d)\b| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s*\n|\s+(?!\S)|\s+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every text round-trips, and the four special tokens have ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def tokenizer_texts(corpus: Corpus, seed: int) -> list[str]:
    chats = conversations(corpus.facts, 12000, 700, seed, Mix(1.0, 0.2))
    return [p.text for p in corpus.short] + [f"{t.question}\n{t.answer}\n" for chat in chats for t in chat.turns]


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class Document:
    """ids and, for each id, whether its prediction counts in the loss."""

    ids: list[int]
    loss_mask: list[bool]


def prose_document(tokenizer: Tokenizer, text: str) -> Document:
    ids = [BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids, END_ID]
    return Document(ids, [False] + [True] * (len(ids) - 1))


def chat_document(tokenizer: Tokenizer, conversation: Conversation) -> Document:
    """The conversation as the chat template writes it; only the assistant's words and its end marker count."""
    ids, loss_mask = [BOS_ID], [False]

    def add(text: str, counts: bool) -> None:
        new = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(new)
        loss_mask.extend([counts] * len(new))

    if conversation.system:
        add(f"{START}system\n{conversation.system}{END}\n", False)
    for turn in conversation.turns:
        add(f"{START}user\n{turn.question}{END}\n{START}assistant\n", False)
        add(f"{turn.answer}{END}", True)
        add("\n", False)
    return Document(ids, loss_mask)


def pack(documents: list[Document], row_len: int, open_rows: int = 64) -> Tensor:
    """First-fit packing into rows of row_len + 1. Returns [rows, 2, row_len + 1]: ids, and targets-to-be.

    Every row starts at the start of a document, as every request does; a longer document is cut.
    """
    size = row_len + 1
    closed: list[tuple[list[int], list[int]]] = []
    rows: list[tuple[list[int], list[int]]] = []
    for document in documents:
        ids = document.ids[:size]
        labels = [i if counts else NO_LOSS for i, counts in zip(ids, document.loss_mask, strict=False)]
        row = next((r for r in rows if len(r[0]) + len(ids) <= size), None)
        if row is None:
            if len(rows) >= open_rows:
                fullest = max(rows, key=lambda r: len(r[0]))
                rows.remove(fullest)
                closed.append(fullest)
            row = ([], [])
            rows.append(row)
        row[0].extend(ids)
        row[1].extend(labels)
    closed.extend(rows)
    padded = [[i + [PAD_ID] * (size - len(i)), t + [NO_LOSS] * (size - len(t))] for i, t in closed]
    return torch.tensor(padded, dtype=torch.int64)


def shard(corpus: Corpus, tokenizer: Tokenizer, row_len: int, index: int, mix: Mix, seed: int) -> Tensor:
    """The index-th portion of training rows, about half a million tokens, the same for the same arguments."""
    rng = random.Random(seed * 1_000_003 + index)
    budget = 500_000
    max_chars = int(row_len * 3.2)
    pool = corpus.short if row_len <= 256 else corpus.long
    documents: list[Document] = []
    used = 0
    chats = conversations(corpus.facts, 400_000 // row_len, max_chars, rng.getrandbits(32), mix)
    for chat in chats:
        if used > budget * mix.chat_share:
            break
        documents.append(chat_document(tokenizer, chat))
        used += len(documents[-1].ids)
    while used < budget:
        documents.append(prose_document(tokenizer, rng.choice(pool).text))
        used += len(documents[-1].ids)
    rng.shuffle(documents)
    rows = pack(documents, row_len)
    return rows[torch.tensor(rng.sample(range(len(rows)), len(rows)))]


def batches(rows: Tensor, batch_size: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids [B, T], targets [B, T]) from the start-th batch on; an incomplete last batch is left out."""
    for start_row in range(start * batch_size, len(rows) - batch_size + 1, batch_size):
        batch = rows[start_row : start_row + batch_size]
        yield batch[:, 0, :-1], batch[:, 1, 1:]
