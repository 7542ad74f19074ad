"""The text of an answer from its tokens, as they come, up to the first stop string. For gateway and `LLM`. Knows no torch.

    token ids ─► Detokenizer: whole characters ─► StopStrings: what is certain not to belong to a stop string ─► text

Neither ever takes back what it has shown, and both cost the same for the last token as for the first.

ids:   … │ context │ unread │          context: the last few tokens that were shown; decoded again so that the tokenizer
          └── decoded ─────┘                    sees what stands before (a leading space, a joined character)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "�"
CONTEXT_TOKENS = 6
UNREAD_TOKENS_MAX = 8  # a character has at most four bytes; more unread tokens than this are bytes that are no text

Decode = Callable[[Sequence[int]], str]


class AnswerText:
    """The text of one answer. `matched` is the stop string that ended it; nothing is shown after it.

    Stop strings count only from the `min_tokens`-th token on. Tokens are taken one by one: where a stop string ends, and so
    what is billed, must not depend on how many of them came at a time.
    """

    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), stop_token_ids: Collection[int] = (), min_tokens: int = 0
    ) -> None:
        """`decode` turns ids into text and leaves special tokens out. A token of `stop_token_ids` that ends has no text."""
        self._detokenizer = Detokenizer(decode)
        self._stop = StopStrings(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched(self) -> str | None:
        return self._stop.matched

    def push(self, token_ids: Sequence[int], *, ends_by_token: bool = False) -> tuple[str, int]:
        """The text that these tokens add, and how many of them count: those up to the one that completes a stop string.

        `ends_by_token`: the engine ended the answer at the last of them because of what it is.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            if self.matched is not None:
                return text, index
            self.num_tokens += 1
            if ends_by_token and index == len(token_ids) - 1 and token_id in self._stop_token_ids:
                return text, index + 1
            new = self._detokenizer.push([token_id])
            text += new if self.num_tokens < self._min_tokens else self._stop.push(new)
        return text, len(token_ids)

    def flush(self) -> str:
        """The text that was held back, at the end of an answer that no stop string ended."""
        rest = self._stop.push(self._detokenizer.flush())
        return rest + self._stop.flush()


class Detokenizer:
    """The text of one request. `decode` turns ids into text and leaves special tokens out."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._unread: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; an unfinished character waits for its rest."""
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
        """The rest at the end of the answer, replacement characters included where bytes are missing."""
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
    """How many characters both begin with."""
    if second.startswith(first):
        return len(first)
    return next((index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))


class StopStrings:
    """Fed with text; gives back the text that is certain not to belong to a stop string. `matched` is set when one is found.

    One Knuth-Morris-Pratt automaton per string, so that the cost of a character does not depend on how much is held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; where a stop string ends inside `text`, what stands before it."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for index, character in enumerate(text):
            complete = [automaton.length for automaton in self._automata if automaton.step(character)]
            if complete:
                longest = max(complete)  # of those that end here, the one that began first
                self.matched = next(a.string for a in self._automata if a.length == longest and a.complete)
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - longest]
        return self._release(self._held + text)

    def flush(self) -> str:
        """What is held back: the text has ended and no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _release(self, seen: str) -> str:
        hold = max(automaton.matched_len for automaton in self._automata)
        self._held = seen[len(seen) - hold :]
        return seen[: len(seen) - hold]


class _Automaton:
    """How many characters of `string` the text seen so far ends with."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = len(string)
        self.matched_len = 0
        self._fallback = _fallbacks(string)

    @property
    def complete(self) -> bool:
        return self.matched_len == self.length

    def step(self, character: str) -> bool:
        while self.matched_len and self.string[self.matched_len] != character:
            self.matched_len = self._fallback[self.matched_len - 1]
        if self.string[self.matched_len] == character:
            self.matched_len += 1
        return self.complete


def _fallbacks(string: str) -> list[int]:
    """For each prefix of `string`, the length of its longest proper suffix that is also its prefix."""
    table = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = table[matched - 1]
        if string[index] == string[matched]:
            matched += 1
        table[index] = matched
    return table
