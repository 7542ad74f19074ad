"""Which tokens would complete a bad word: one lookup per new token, however many words there are and however long they are.

The words without their last tokens form a tree. Each node also has a failure link to the next shorter node that matches the end
of the same text (Aho and Corasick, "Efficient string matching", 1975). Nodes are built when a text first reaches them. Knows no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from engine.scheduling.request import UNKNOWN_TOKEN, Request

ROOT = 0  # the root: the text ends with the beginning of no word


class BadWordTree:
    """Nodes are numbers, so that none refers to another and the tree is freed as soon as it is no longer used."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        # The words that begin with the text of each node; none once its children are known, except at the root.
        self._words_from: list[Sequence[Sequence[int]]] = []
        self._depths: list[int] = []
        self._forbidden_tokens: list[np.ndarray] = []
        self._failure_links: list[int] = []
        self._children: list[dict[int, int]] = []  # children that are built
        self._unbuilt_children: list[dict[int, list[Sequence[int]]] | None] = []  # words of children not built yet, by token
        self._add_node(words, 0, ROOT)

    def forbidden_tokens(self, node: int) -> np.ndarray:
        """The last tokens of all words whose other tokens end a text at this node: [F] int64, ascending."""
        return self._forbidden_tokens[node]

    def next_node(self, node: int, token_id: int) -> int:
        """The node that a text at `node` reaches with one more token. Builds it, and those it falls back to, if missing."""
        to_build: list[tuple[int, list[Sequence[int]]]] = []
        while (reached := self._children[node].get(token_id)) is None:
            words = self._unbuilt_children_of(node).pop(token_id, None)
            if words:
                to_build.append((node, words))
            if node == ROOT:
                reached = ROOT
                break
            node = self._failure_links[node]
        for parent, words in reversed(to_build):  # the shortest first: the others link to it
            reached = self._children[parent][token_id] = self._add_node(words, self._depths[parent] + 1, reached)
        return reached

    def _add_node(self, words: Sequence[Sequence[int]], depth: int, failure_link: int) -> int:
        """Add the node for texts that end with the first `depth` tokens of these words."""
        final_tokens = {word[-1] for word in words if len(word) == depth + 1}
        if depth and not final_tokens:
            self._forbidden_tokens.append(self._forbidden_tokens[failure_link])
        else:
            inherited = self._forbidden_tokens[failure_link].tolist() if depth else []
            self._forbidden_tokens.append(np.array(sorted(final_tokens.union(inherited)), dtype=np.int64))
        self._words_from.append(words)
        self._depths.append(depth)
        self._failure_links.append(failure_link)
        self._children.append({})
        self._unbuilt_children.append(None)
        return len(self._depths) - 1

    def _unbuilt_children_of(self, node: int) -> dict[int, list[Sequence[int]]]:
        children = self._unbuilt_children[node]
        if children is None:
            children, depth = {}, self._depths[node]
            for word in self._words_from[node]:
                if len(word) > depth + 1:
                    children.setdefault(word[depth], []).append(word)
            self._unbuilt_children[node] = children
            if node != ROOT:
                self._words_from[node] = ()
        return children


class _Cursor:
    """How far one request's output has been read, and the node reached."""

    __slots__ = ("node", "position", "tree")

    def __init__(self, tree: BadWordTree, position: int) -> None:
        self.tree = tree
        self.position = position
        self.node = ROOT


class BadWords:
    """The bad words of requests, with a cursor for each request while it exists. All answers of a request share one tree."""

    def __init__(self) -> None:
        self._cursors: WeakKeyDictionary[Request, _Cursor] = WeakKeyDictionary()
        self._trees: WeakValueDictionary[int, BadWordTree] = WeakValueDictionary()  # by id of their words, which they keep

    def forbidden_tokens(self, request: Request, position: int) -> np.ndarray:
        """The tokens that would complete a bad word at `position`: [F] int64, ascending.

        If a token before it is unknown, because the row's step will yield no token, the text is read up to there.
        """
        cursor = self._cursors.get(request)
        if cursor is None:
            cursor = self._cursors[request] = _Cursor(self._tree_of(request), request.num_prompt_tokens)
        if position < cursor.position:
            cursor.position, cursor.node = request.num_prompt_tokens, ROOT
        tokens, tree, node = request.token_ids, cursor.tree, cursor.node
        for index in range(cursor.position, position):
            token_id = tokens[index]
            if token_id == UNKNOWN_TOKEN:
                position = index
                break
            node = tree.next_node(node, token_id)
        cursor.position, cursor.node = position, node
        return tree.forbidden_tokens(node)

    def _tree_of(self, request: Request) -> BadWordTree:
        words = request.sampling.bad_words_token_ids
        assert words, "a request without bad words"
        tree = self._trees.get(id(words))
        if tree is None:
            tree = self._trees[id(words)] = BadWordTree(words)
        return tree
