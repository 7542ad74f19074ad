"""The bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"


class Vocabulary:
    """Looks single tokens up in a tokenizer, byte-level or with byte fallback."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in json.dumps(decoder) else None
        self.longest_token_chars = max((len(piece) for piece in tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a special one, which is left out of an answer's text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes, which may be part of a character. Empty for an unknown id."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return str(piece).encode()
        if self._byte_of is not None and all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        return str(piece).replace(_SPACE_MARK, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level BPE: printable Latin-1 is itself, other bytes are U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
