"""Which tokens would complete a bad word: one lookup per new token, however many words there are and however long they are.

The words without their last tokens form a tree. Each node also links to the next shorter node that matches the end of the same
text (Aho and Corasick, "Efficient string matching", 1975). Nodes are created when a text first reaches them. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from engine.scheduling.request import UNKNOWN_TOKEN, Request

START = 0  # the root: the text ends with the beginning of no word


class BadWordTree:
    """Nodes ("places") by number, so that none refers to another and the tree is freed as soon as it is no longer used."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words: list[Sequence[Sequence[int]]] = []  # the words that continue from each node
        self._depths: list[int] = []
        self._ids: list[np.ndarray] = []
        self._shorter: list[int] = []
        self._longer: list[dict[int, int]] = []  # the children that exist
        self._groups: list[dict[int, list[Sequence[int]]] | None] = []  # words of missing children
        self._make(words, 0, START)

    def ids(self, place: int) -> np.ndarray:
        """The last tokens of all words whose other tokens end a text at this node: [F] int64, ascending."""
        return self._ids[place]

    def behind(self, place: int, token_id: int) -> int:
        """The node of a text after one more token."""
        new: list[tuple[int, list[Sequence[int]]]] = []
        while (reached := self._longer[place].get(token_id)) is None:
            words = self._groups_of(place).pop(token_id, None)
            if words:
                new.append((place, words))
            if place == START:
                reached = START
                break
            place = self._shorter[place]
        for before, words in reversed(new):  # from the shortest, to which the others link
            reached = self._longer[before][token_id] = self._make(words, self._depths[before] + 1, reached)
        return reached

    def _make(self, words: Sequence[Sequence[int]], depth: int, shorter: int) -> int:
        """Add the node for texts that end with the first `depth` tokens of these words."""
        ids = {word[-1] for word in words if len(word) == depth + 1}
        if depth and not ids:
            self._ids.append(self._ids[shorter])
        else:
            known = self._ids[shorter].tolist() if depth else []
            self._ids.append(np.array(sorted(ids.union(known)), dtype=np.int64))
        self._words.append(words)
        self._depths.append(depth)
        self._shorter.append(shorter)
        self._longer.append({})
        self._groups.append(None)
        return len(self._depths) - 1

    def _groups_of(self, place: int) -> dict[int, list[Sequence[int]]]:
        groups = self._groups[place]
        if groups is None:
            groups, depth = {}, self._depths[place]
            for word in self._words[place]:
                if len(word) > depth + 1:
                    groups.setdefault(word[depth], []).append(word)
            self._groups[place] = groups
            if place != START:
                self._words[place] = ()
        return groups


class _Reading:
    """How much of one request's output has been read, and the node reached."""

    __slots__ = ("place", "position", "tree")

    def __init__(self, tree: BadWordTree, position: int) -> None:
        self.tree = tree
        self.position = position
        self.place = START


class BadWords:
    """Keeps the state of each request while the request exists. All answers of a request share one tree."""

    def __init__(self) -> None:
        self._readings: WeakKeyDictionary[Request, _Reading] = WeakKeyDictionary()
        self._trees: WeakValueDictionary[int, BadWordTree] = WeakValueDictionary()  # by id of their words, which they keep

    def ids(self, request: Request, position: int) -> np.ndarray:
        """The tokens that would complete a bad word at `position`: [F] int64, ascending.

        If a token before it is unknown, because the row's step will yield nothing, the text is read up to there.
        """
        reading = self._readings.get(request)
        if reading is None:
            reading = self._readings[request] = _Reading(self._tree_of(request), request.num_prompt_tokens)
        if position < reading.position:
            reading.position, reading.place = request.num_prompt_tokens, START
        tokens, tree, place = request.token_ids, reading.tree, reading.place
        for at in range(reading.position, position):
            token_id = tokens[at]
            if token_id == UNKNOWN_TOKEN:
                position = at
                break
            place = tree.behind(place, token_id)
        reading.position, reading.place = position, place
        return tree.ids(place)

    def _tree_of(self, request: Request) -> BadWordTree:
        words = request.sampling.bad_words_token_ids
        assert words, "a request without bad words"
        tree = self._trees.get(id(words))
        if tree is None:
            tree = self._trees[id(words)] = BadWordTree(words)
        return tree
