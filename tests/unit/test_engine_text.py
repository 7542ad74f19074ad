"""The tokenizer: text to tokens and back, streams of whole characters, special tokens, unreadable files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from engine.errors import NotAModelDirectory
from engine.text.detokenizer import AnswerText
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 🙂", "<s> is special"])
def test_text_survives_encoding_and_decoding(text: str, model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_streamed_pieces_add_up_to_the_text_without_broken_characters(model: Path) -> None:
    tokenizer = Tokenizer(model)
    text = "né 世界 🙂!"
    answer = AnswerText(tokenizer.decode)
    pieces = [answer.push([token_id])[0] for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_special_tokens_have_no_text_in_answers(model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode([*tokenizer.encode("end"), tokenizer.token_to_id("</s>") or 0]) == "end"


def test_the_text_of_a_single_token_keeps_its_leading_space(tmp_path: Path) -> None:
    rust_tokenizer = RustTokenizer(models.BPE(vocab={"▁a": 0, "▁": 1, "b": 2, "<0xE9>": 3}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust_tokenizer.decoder = decoders.Sequence(steps)
    rust_tokenizer.add_special_tokens(["<s>"])
    rust_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_text(token_id) for token_id in range(5)] == [" a", " ", "b", "\ufffd", "<s>"]


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "Model missing"),
        ("[]", "invalid type"),
        ("", "EOF"),
        ("text", "expected ident"),
        ('{"model": {}}', "did not match"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(NotAModelDirectory, match=rf"tokenizer\.json is not a tokenizer: .*{message}"):
        Tokenizer(tmp_path)
