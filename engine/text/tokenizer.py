"""Text to token ids and back, by tokenizer.json of a model directory. Knows no torch and no request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from engine.errors import NotAModelDirectory, PromptError
from engine.text.length import fewest_tokens


class Tokenizer:
    """Text to token ids and back, by the model's own tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise NotAModelDirectory(
                f"{directory} has no tokenizer.json: fetch it, or have transformers' save_pretrained write it"
            )
        try:
            self._tokenizer = RustTokenizer.from_buffer(path.read_bytes())
        except ValueError as error:  # any fault that the library finds in the file
            raise NotAModelDirectory(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._token_texts: dict[int, str] = {}

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def special_tokens_from(self, first_id: int) -> list[str]:
        """The special tokens with this id or a larger one."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for token_id, token in added.items() if token_id >= first_id and token.special]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens are those that the tokenizer puts around a text, such as the first one.

        Raises `PromptError` for text that cannot be encoded as UTF-8.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise PromptError("the text holds half of a surrogate pair, which is not text") from error
        return ids

    def encode_prompt(self, text: str, *, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, for a prompt. Raises `PromptError` for an empty text and, before tokenising it, for one that is too long
        for the context in any tokenisation."""
        if not text:
            raise PromptError("the prompt is empty")
        fewest = fewest_tokens(text, longest_token_chars=self.longest_token_chars)
        if fewest >= max_model_len:
            raise PromptError(
                f"the prompt has {len(text)} characters and so at least {fewest} tokens; at most {max_model_len - 1} tokens fit"
                " the context"
            )
        return self.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def longest_token_chars(self) -> int:
        """Length of the longest token in characters. With a byte-level tokenizer each of those stands for a byte, and a
        character of text has at least one byte, so no token covers more characters of a text than this."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included; part of a character becomes a replacement character.

        Computed as the text that a second copy of the token adds to the first, because a SentencePiece decoder drops the space
        at the start of a text.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            once, twice = (self.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
            text = self._token_texts[token_id] = twice[len(once) :] if twice.startswith(once) else once
        return text
