"""The text of an answer from its tokens as they arrive, up to the first stop string. For gateway and `LLM`. Knows no torch.

    token ids ─► Detokenizer: whole characters ─► StopStrings: text that is certainly not part of a stop string ─► text

Neither ever retracts text that was shown, and the last token costs no more than the first.

ids:   … │ shown │ pending │         shown: the last tokens whose text was shown; decoded again, because the tokenizer needs
          └─ decoded ──────┘          the text before (a leading space, a joined character)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "�"
SHOWN_TOKENS_KEPT = 6
SHOWN_TOKENS_MAX = 9  # where the shown tokens are cut to SHOWN_TOKENS_KEPT, and decoded once more
PENDING_TOKENS_MAX = 8  # a character has at most four bytes; with more pending tokens than this, the bytes are not text

Decode = Callable[[Sequence[int]], str]
TokenText = Callable[[int], str]


class AnswerText:
    """The text of one answer. `matched` is the stop string that ended it; nothing is shown after it.

    Stop strings count only from the `min_tokens`-th token on. Tokens are processed one by one: where a stop string ends, and so
    what is billed, must not depend on how many tokens arrive at a time.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        token_text: TokenText | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`decode` and `token_text`: as of `Detokenizer`. A token of `stop_token_ids` that ends the answer has no text."""
        self._detokenizer = Detokenizer(decode, token_text)
        self._stop = StopStrings(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched(self) -> str | None:
        return self._stop.matched

    def push(self, token_ids: Sequence[int], *, ends_by_token: bool = False) -> tuple[str, int]:
        """The text that these tokens add, and how many of them count: those up to the one that completes a stop string.

        `ends_by_token`: the last of them is an end token with which the engine ended the answer.
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
    """The text of one request."""

    def __init__(self, decode: Decode, token_text: TokenText | None = None) -> None:
        """`decode` turns ids into text and omits special tokens. `token_text`: the same for one token, given for tokenizers
        whose text is that of the tokens' bytes, joined. They need no context after a whole character."""
        self._decode = decode
        self._token_text = token_text
        self._shown: list[int] = []
        self._shown_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; an unfinished character is held back until its rest arrives."""
        if self._token_text is not None and len(token_ids) == 1 and not self._pending and not self._shown:
            text = self._token_text(token_ids[0])
            if not text.endswith(REPLACEMENT):
                return text
        self._pending.extend(token_ids)
        num_pending = len(self._pending)
        shortest = max(0, num_pending - PENDING_TOKENS_MAX)
        for count in range(num_pending, shortest, -1):
            decoded = self._decode(self._shown + self._pending[:count])
            text = _text_after(self._shown_text, decoded)
            if not text.endswith(REPLACEMENT):
                self._show(count, decoded)
                return text
        return self.flush() if shortest else ""

    def flush(self) -> str:
        """The rest at the end of the answer, replacement characters included where bytes are missing."""
        if not self._pending:
            return ""
        decoded = self._decode(self._shown + self._pending)
        text = _text_after(self._shown_text, decoded)
        self._show(len(self._pending), decoded)
        return text

    def _show(self, count: int, decoded: str) -> None:
        """The first `count` pending tokens are shown now; `decoded` is the text of the tokens shown before and these."""
        self._shown += self._pending[:count]
        del self._pending[:count]
        if self._token_text is not None and not decoded.endswith(REPLACEMENT):
            self._shown, decoded = [], ""
        elif len(self._shown) > SHOWN_TOKENS_MAX:
            decoded = self._keep_last()
        self._shown_text = decoded

    def _keep_last(self) -> str:
        """Keep the last shown tokens, starting at the beginning of a character if possible. Returns their text. After a part of
        a character, a tokenizer may decode a whole one to no text at all."""
        shown = self._shown
        for kept in range(SHOWN_TOKENS_KEPT, SHOWN_TOKENS_MAX + 1):
            self._shown = shown[-kept:]
            text = self._decode(self._shown)
            if not text.startswith(REPLACEMENT):
                break
        return text


def _text_after(before: str, decoded: str) -> str:
    """The part of `decoded` after its common prefix with `before`."""
    if decoded.startswith(before):
        return decoded[len(before) :]
    mismatch = next((index for index, pair in enumerate(zip(before, decoded, strict=False)) if pair[0] != pair[1]), None)
    return "" if mismatch is None else decoded[mismatch:]


class StopStrings:
    """Takes text; returns the text that is certainly not part of a stop string. `matched` is set when one is found.

    One Knuth-Morris-Pratt automaton per string, so that the cost of a character does not depend on how much is held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._held_back = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; if a stop string ends inside `text`, only what precedes it."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for index, character in enumerate(text):
            completed_lens = [automaton.length for automaton in self._automata if automaton.step(character)]
            if completed_lens:
                longest = max(completed_lens)  # of the stop strings that end here, the one that began first
                self.matched = next(a.string for a in self._automata if a.length == longest and a.complete)
                joined = self._held_back + text[: index + 1]
                self._held_back = ""
                return joined[: len(joined) - longest]
        return self._release(self._held_back + text)

    def flush(self) -> str:
        """Return the text held back: the answer has ended without a stop string."""
        text, self._held_back = self._held_back, ""
        return text

    def _release(self, text: str) -> str:
        num_held = max(automaton.matched_len for automaton in self._automata)
        self._held_back = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _Automaton:
    """The number of characters of `string` with which the text so far ends."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = len(string)
        self.matched_len = 0
        self._failure = _failure_function(string)

    @property
    def complete(self) -> bool:
        return self.matched_len == self.length

    def step(self, character: str) -> bool:
        while self.matched_len and self.string[self.matched_len] != character:
            self.matched_len = self._failure[self.matched_len - 1]
        if self.string[self.matched_len] == character:
            self.matched_len += 1
        return self.complete


def _failure_function(string: str) -> list[int]:
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
