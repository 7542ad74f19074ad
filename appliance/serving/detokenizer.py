"""Token ids back to text, piece by piece. Never shows half a character, and costs the same for the last token as for the first.

ids:   … │ context │ unread │          context: the last few tokens that were shown; decoded again so that the tokenizer
          └── decoded ─────┘                    sees what stands before (a leading space, a joined character)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"
CONTEXT_TOKENS = 6
UNREAD_TOKENS_MAX = 8  # a character has at most four bytes; more unread tokens than this are bytes that are no text


class Detokenizer:
    """The text of one request. `decode` turns ids into text and leaves special tokens out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._unread: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete; an unfinished character waits for its rest."""
        self._unread.extend(token_ids)
        if not self._unread:
            return ""
        shortest = max(0, len(self._unread) - UNREAD_TOKENS_MAX)
        for count in range(len(self._unread), shortest, -1):
            text = self._new_text(count)
            if not text.endswith(REPLACEMENT):
                self._advance(count)
                return text
        return self.flush() if shortest else ""

    def flush(self) -> str:
        """Return the rest at the end of the answer, replacement characters included where bytes are missing."""
        text = self._new_text() if self._unread else ""
        self._advance(len(self._unread))
        return text

    def _new_text(self, count: int | None = None) -> str:
        before = self._decode(self._context) if self._context else ""
        together = self._decode([*self._context, *self._unread[:count]])
        return together[_shared_len(before, together) :]

    def _advance(self, count: int) -> None:
        if count:
            self._context = [*self._context, *self._unread[:count]][-CONTEXT_TOKENS:]
            self._unread = self._unread[count:]


def _shared_len(first: str, second: str) -> int:
    """Return how many characters both begin with."""
    if second.startswith(first):
        return len(first)
    return next((index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
