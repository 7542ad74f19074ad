"""The bytes of tokens: byte-level and SentencePiece tokenizers, added and special tokens, ids beyond the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.errors import NotAModelDirectory, UnsupportedModel
from engine.grammar.vocabulary import load_vocabulary, vocabulary_of

TEXT = 'Zoë said: "naïve\tcafé" {"k": [1, 2]}\n\U0001f600 \x00'


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the café is naïve, the end of the end"] * 9, trainer)
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


def sentencepiece_json(decoder: dict[str, Any]) -> dict[str, Any]:
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b▁c", "é"]
    added = [{"id": 1, "content": "</s>", "special": True}]
    return {"model": {"vocab": [[token, 0.0] for token in tokens]}, "decoder": decoder, "added_tokens": added}


def test_byte_level_tokens_add_up_to_the_bytes_of_a_text() -> None:
    tokenizer = byte_level_tokenizer()
    size = tokenizer.get_vocab_size()
    vocabulary = vocabulary_of(json.loads(tokenizer.to_str()), size + 5, [0])
    assert b"".join(vocabulary.tokens[i] for i in tokenizer.encode(TEXT).ids).decode() == TEXT
    assert vocabulary.tokens[size - 1] == b"<plain>"
    assert vocabulary.tokens[0] == b""
    assert vocabulary.tokens[size:] == (b"",) * 5
    assert vocabulary.eos_token_ids == (0,)
    assert not vocabulary.strips_first_space


def byte_level_bytes(token: str) -> bytes:
    return vocabulary_of({"model": {"vocab": {token: 0}}, "decoder": {"type": "ByteLevel"}}, 1, []).tokens[0]


def test_the_byte_level_alphabet_is_that_of_the_tokenizers_library() -> None:
    text = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, *range(0x10000, 0x110000, 0x10000))))
    ((token, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert byte_level_bytes(token) == text.encode()
    assert sorted(map(byte_level_bytes, pre_tokenizers.ByteLevel.alphabet())) == [bytes([byte]) for byte in range(256)]


def test_sentencepiece_tokens_become_spaces_and_bytes() -> None:
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    vocabulary = vocabulary_of(sentencepiece_json({"type": "Sequence", "decoders": [*steps, strip]}), 300, [1])
    assert vocabulary.tokens[2 + 0xE9] == b"\xe9"
    assert vocabulary.tokens[258:262] == (b" ", b" a", b"b c", "é".encode())
    assert vocabulary.tokens[1] == b""
    assert vocabulary.strips_first_space
    assert not vocabulary_of(sentencepiece_json({"type": "Sequence", "decoders": steps}), 300, [1]).strips_first_space


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(replacement="_", prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Replace("▁", "-"), decoders.ByteFallback(), decoders.Fuse()]),
    ],
    ids=["Metaspace", "Replace"],
)
def test_tokens_have_the_bytes_that_the_decoder_makes_of_them_whatever_character_stands_for_a_space(decoder: Any) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"x": 0, "a_b": 1, "▁b": 2}, merges=[]))
    tokenizer.decoder = decoder
    vocabulary = vocabulary_of(json.loads(tokenizer.to_str()), 3, [0])
    assert [token.decode() for token in vocabulary.tokens[1:]] == [tokenizer.decode([i]) for i in range(1, 3)]


def test_added_tokens_have_the_bytes_that_the_decoder_makes_of_them() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"x": 0}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["▁▁", "<0x41>", "\n\n"])
    vocabulary = vocabulary_of(json.loads(tokenizer.to_str()), 4, [0])
    assert [token.decode() for token in vocabulary.tokens[1:]] == [tokenizer.decode([i]) for i in range(1, 4)]


def test_added_tokens_of_a_byte_level_tokenizer_are_mapped_to_bytes() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["Ġx", "  "])
    vocabulary = vocabulary_of(json.loads(tokenizer.to_str()), tokenizer.get_vocab_size(), [0])
    assert vocabulary.tokens[-2:] == (b" x", b"  ")


@pytest.mark.parametrize(("scheme", "strips"), [("always", True), ("first", True), ("never", False)])
def test_metaspace_strips_the_first_space_unless_prepend_scheme_is_never(scheme: str, strips: bool) -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
    assert vocabulary_of(sentencepiece_json(decoder), 262, [1]).strips_first_space is strips


@pytest.mark.parametrize(("decoder", "named"), [({"type": "WordPiece"}, r"\['WordPiece'\]"), (None, "none")])
def test_another_decoder_or_none_is_refused_by_name(decoder: dict[str, str] | None, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"has the decoder {named}; structured output takes"):
        vocabulary_of({"model": {"vocab": {"a": 0}}, "decoder": decoder}, 1, [0])


def test_a_missing_or_malformed_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path, 10, [0])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(NotAModelDirectory, match="not JSON"):
        load_vocabulary(tmp_path, 10, [0])


def test_end_token_ids_beyond_the_vocabulary_are_dropped() -> None:
    data = sentencepiece_json({"type": "Metaspace"})
    assert vocabulary_of(data, 262, [1, 900, -1]).eos_token_ids == (1,)


@pytest.mark.parametrize("options", [{"add_prefix_space": False}, {"prepend_scheme": "never", "add_prefix_space": True}])
def test_metaspace_without_a_prefix_strips_no_space(options: dict[str, Any]) -> None:
    assert not vocabulary_of(sentencepiece_json({"type": "Metaspace", **options}), 262, [1]).strips_first_space


@pytest.mark.parametrize(
    "strip",
    [{"content": " ", "start": 0, "stop": 1}, {"content": " "}, {"content": "x", "start": 1}, {"type": "Fuse", "start": 1}],
    ids=str,
)
def test_only_a_step_that_strips_leading_spaces_drops_the_first_space(strip: dict[str, Any]) -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Strip", **strip}]}
    assert not vocabulary_of(sentencepiece_json(decoder), 262, [1]).strips_first_space


def test_a_step_that_replaces_another_character_does_not_make_a_sentencepiece_decoder() -> None:
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    assert vocabulary_of(sentencepiece_json(replace), 262, [1]).tokens[259] == b" a"
    for other in ({"pattern": {"String": "_"}}, {"pattern": {"Regex": "▁"}}, {"type": "Other"}):
        with pytest.raises(UnsupportedModel, match="the decoder"):
            vocabulary_of(sentencepiece_json(replace | other), 262, [1])


@pytest.mark.parametrize("vocab_size", [99, 100])
def test_tokens_beyond_the_model_are_left_out(vocab_size: int) -> None:
    data = sentencepiece_json({"type": "Metaspace"})
    data["added_tokens"].append({"id": 100, "content": "x", "special": False})
    vocabulary = vocabulary_of(data, vocab_size, [1])
    assert (vocabulary.size, vocabulary.tokens[98]) == (vocab_size, bytes([96]))


def test_special_and_end_tokens_have_no_bytes() -> None:
    data = sentencepiece_json({"type": "Metaspace"})
    vocabulary = vocabulary_of(data, 262, [258])
    assert (vocabulary.tokens[1], vocabulary.tokens[258]) == (b"", b"")
    assert vocabulary.tokens[257] == b"\xff"
