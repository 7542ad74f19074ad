"""Text of a model: tokenizer.json of a model directory, to token ids and back. Knows no torch and no request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from engine.errors import NotAModelDirectory


class TextStream:
    """Turns the tokens of one request into text as they come; a character cut between tokens waits for its rest."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        piece: str | None = self._stream.step(self._tokenizer, token_id)
        return piece or ""


class Tokenizer:
    """Text to token ids and back, by the model's own tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise NotAModelDirectory(f"{directory} has no tokenizer.json")
        try:
            self._tokenizer = RustTokenizer.from_buffer(path.read_bytes())
        except ValueError as error:  # whatever the library finds wrong in the text
            raise NotAModelDirectory(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens are those that the tokenizer puts around a text, such as the first one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)
