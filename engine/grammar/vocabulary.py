"""The bytes that each token id of a model stands for, read from its tokenizer.json. Knows no grammar library.

A grammar is a set of byte strings, so a mask over tokens is only as exact as this table. The supported models have one of two
alphabets: byte-level BPE, in which each character of a token stands for one byte (Radford et al. 2019, GPT-2), and
SentencePiece, in which a token is text, a character, mostly `▁`, stands for a space and `<0xNN>` for one byte.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import NotAModelDirectory, UnsupportedModel

NO_BYTES = b""  # the bytes of an id that no text contains: padding of the embedding, special tokens
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]` are the bytes that token id i adds to a text; empty for an id that never occurs in one.

    `eos_token_ids` end a text and have no bytes. With `strips_first_space` the decoder drops one space at the start of a text
    (SentencePiece models), so that the bytes of an answer are a space longer than its text.
    """

    tokens: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    strips_first_space: bool = False

    @property
    def size(self) -> int:
        return len(self.tokens)


def load_vocabulary(directory: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Read tokenizer.json of a model directory. `vocab_size` is the model's, which may exceed the tokenizer's.

    Raises `NotAModelDirectory` without the file, `UnsupportedModel` for an alphabet other than the two above.
    """
    path = directory / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_bytes())
    except OSError as error:
        raise NotAModelDirectory(f"{directory} has no readable tokenizer.json") from error
    except ValueError as error:
        raise NotAModelDirectory(f"{path} is not JSON: {error}") from error
    return vocabulary_of(tokenizer, vocab_size, eos_token_ids)


def vocabulary_of(tokenizer: Mapping[str, Any], vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """The table for a parsed tokenizer.json; see `load_vocabulary`."""
    decoders = list(_steps(tokenizer.get("decoder"), "decoders"))
    kinds = {str(step.get("type")) for step in decoders}
    added = {int(token["id"]): token for token in tokenizer.get("added_tokens") or []}
    to_bytes: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"} or any(_replaces_metaspace(step) for step in decoders):
        to_bytes = functools.partial(_sentencepiece, list(_replacements(decoders)))
    else:
        supported = "ByteLevel, or Metaspace / ByteFallback"
        raise UnsupportedModel(f"tokenizer.json has the decoder {sorted(kinds) or 'none'}; structured output takes {supported}")
    tokens = [NO_BYTES] * vocab_size
    for text, token_id in _entries(tokenizer):
        if token_id < vocab_size and token_id not in added:
            tokens[token_id] = to_bytes(text)
    for token_id, token in added.items():  # the decoder treats them like all others: "▁▁" of Gemma is two spaces
        if token_id < vocab_size and not token.get("special"):
            tokens[token_id] = to_bytes(str(token["content"]))
    eos = tuple(sorted({token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size}))
    for token_id in eos:
        tokens[token_id] = NO_BYTES
    return Vocabulary(tuple(tokens), eos, any(_strips_space(step) for step in decoders))


def _entries(tokenizer: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Pairs of token and id: a mapping in BPE and WordPiece, a list of [token, score] in Unigram."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        return [(text, int(token_id)) for text, token_id in vocab.items()]
    return [(str(entry[0]), token_id) for token_id, entry in enumerate(vocab)]


def _steps(component: Any, member: str) -> Iterable[Mapping[str, Any]]:
    """The steps of a pipeline: a `Sequence` is opened, anything else is one step."""
    if not isinstance(component, dict):
        return
    if component.get("type") == "Sequence":
        for inner in component.get(member) or []:
            yield from _steps(inner, member)
    else:
        yield component


def _replaces_metaspace(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": _METASPACE}


def _replacements(decoders: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """What the decoder replaces in each token, in order: pairs of old and new text."""
    for step in decoders:
        if step.get("type") == "Metaspace":
            yield str(step.get("replacement", _METASPACE)), " "
        elif step.get("type") == "Replace" and "String" in step["pattern"]:
            yield step["pattern"]["String"], step["content"]


def _strips_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step.get("type") == "Strip" and step.get("content") == " " and int(step.get("start", 0)) > 0


def _sentencepiece(replacements: Iterable[tuple[str, str]], text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    if byte:
        return bytes([int(byte.group(1), 16)])
    for old, new in replacements:
        text = text.replace(old, new)
    return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one-to-one map from characters to bytes: printable ones map to themselves, the rest are moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    """Bytes of a byte-level token. One that contains a foreign character was added as plain text and represents itself."""
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:
        return text.encode()
