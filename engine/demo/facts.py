"""Turns documentation pages and docstrings into facts (a subject and an answer about it) and passages of prose."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.demo.rst import ENTRY_KINDS, SENTENCE_END, Block, ascii_text, inline, parse
from engine.demo.verbs import VERBS, third_person

ANSWER_CHARS = 280
FUNCTIONS = frozenset(["function", "method", "classmethod", "staticmethod", "coroutinefunction", "coroutinemethod"])


@dataclass(frozen=True)
class Fact:
    """kind: function, class, module, exception, attribute, term, question or topic. code may be empty."""

    kind: str
    subject: str
    answer: str
    code: str = ""
    page: str = ""
    signature: str = ""


@dataclass(frozen=True)
class Passage:
    """A run of prose from one page, with its heading."""

    page: str
    text: str


def sentences(text: str, limit: int = ANSWER_CHARS) -> str:
    """As many whole sentences as fit in limit characters; empty when the first one does not fit."""
    kept: list[str] = []
    for sentence in SENTENCE_END.split(text):
        if sentence.startswith(("See ", "Refer to ", "For more ")):
            continue
        if len(" ".join([*kept, sentence])) > limit or not sentence.rstrip().endswith((".", "!", "?")):
            break
        kept.append(sentence)
    return " ".join(kept)


def about(subject: str, text: str) -> str:
    """The description as an answer that names its subject: 'Return x.' becomes '`f` returns x.'"""
    head, _, rest = text.partition(" ")
    if head.lower() in VERBS and head[:1].isupper():
        return f"`{subject}` {third_person(head.lower())} {rest}"
    if head in ("A", "An", "The") and subject.rsplit(".", 1)[-1] not in text[:60]:
        return f"`{subject}`: {text}"
    if head in ("Exception", "Raised", "This"):
        return f"`{subject}`: {text}"
    return text if subject.rsplit(".", 1)[-1] in text[:60] else f"`{subject}`: {text}"


def _short(code: str) -> str:
    lines = code.splitlines()
    return code if 1 <= len(lines) <= 9 and max(map(len, lines)) <= 80 else ""


class _FactExtractor:
    """Collects the facts of one page while walking its blocks."""

    def __init__(self, page: str, blocks: list[Block]) -> None:
        self.page = page
        self.blocks = blocks
        self.module = ""
        self.parents: list[tuple[int, str]] = []

    def facts(self) -> Iterator[Fact]:
        for index, block in enumerate(self.blocks):
            if block.kind == "module":
                self.module = block.text
                yield from self._module_fact(index, block)
            elif block.kind == "title":
                self.parents = []
                yield from self._topic_fact(index, block)
            elif block.kind in ENTRY_KINDS:
                yield from self._entry_fact(index, block)
            elif block.kind == "term" and self.page == "glossary":
                yield from self._fact("term", block.text.strip("`"), index, block.indent)

    def _body(self, index: int, indent: int) -> tuple[str, str]:
        texts: list[str] = []
        for block in self.blocks[index + 1 : index + 6]:
            if block.kind == "code" and texts:
                return " ".join(texts), _short(block.text)
            if block.kind != "para" or block.indent < indent or block.text.startswith(("- ", "Source code:")):
                if block.text.startswith("Source code:"):
                    continue
                break
            texts.append(block.text)
        return " ".join(texts), ""

    def _fact(self, kind: str, subject: str, index: int, indent: int) -> Iterator[Fact]:
        text, code = self._body(index, indent + 1 if kind != "topic" else 0)
        if text.endswith(":") and not code:
            text = text.rsplit(". ", 1)[0] + "." if ". " in text else ""
        answer = text if code and len(text) <= ANSWER_CHARS else sentences(text)
        if len(answer) >= 20:
            yield Fact(kind, subject, answer, code if answer == text else "", self.page)

    def _module_fact(self, index: int, block: Block) -> Iterator[Fact]:
        text, _ = self._body(index, 0)
        synopsis = block.extra.rstrip(".")
        answer = sentences(text, 230 - len(synopsis))
        if synopsis:
            answer = f"The `{block.text}` module: {synopsis}. {answer}".strip()
        if len(answer) > 30:
            yield Fact("module", block.text, answer, "", self.page)

    def _topic_fact(self, index: int, block: Block) -> Iterator[Fact]:
        title = block.text
        if title.endswith("?"):
            yield from self._fact("question", title, index, 0)
        elif len(title) < 60 and title.count(" ") and not title.startswith("`"):
            yield from self._fact("topic", title, index, 0)

    def _entry_fact(self, index: int, block: Block) -> Iterator[Fact]:
        name = block.text.split("(")[0].strip().lstrip("@")
        while self.parents and self.parents[-1][0] >= block.indent:
            self.parents.pop()
        if self.parents and "." not in name:
            name = f"{self.parents[-1][1]}.{name}"
        elif self.module and not name.startswith(self.module + ".") and not self.parents:
            name = f"{self.module}.{name}"
        self.parents.append((block.indent, name))
        if not re.fullmatch(r"[\w.]+", name):
            return
        kind = block.kind
        if kind in FUNCTIONS or kind.endswith("decorator") or ("(" in block.text and kind != "class"):
            kind = "function"
        elif kind == "data":
            kind = "attribute"
        for fact in self._fact(kind, name, index, block.indent):
            yield Fact(kind, name, about(name, fact.answer), fact.code, self.page, self._signature(name, block.text))

    def _signature(self, name: str, text: str) -> str:
        _, opened, rest = text.partition("(")
        return f"{name}({rest}" if opened and rest.endswith(")") and len(rest) < 70 else ""


def page_facts(page: str, blocks: list[Block]) -> list[Fact]:
    return list(_FactExtractor(page, blocks).facts())


def passages(page: str, blocks: list[Block], limit: int) -> Iterator[Passage]:
    """Prose of at most about limit characters each, cut between blocks; each passage begins with its heading."""
    heading, size = "", 0
    parts: list[str] = []

    def flush() -> Iterator[Passage]:
        if size >= 120:
            yield Passage(page, f"# {heading}\n\n" + "\n\n".join(parts) if heading else "\n\n".join(parts))

    for block in blocks:
        text = f"```python\n{block.text}\n```" if block.kind == "code" else block.text
        if block.kind in ENTRY_KINDS:
            text = f"`{block.text}`"
        if block.kind == "title" or size + len(text) > limit:
            yield from flush()
            parts, size = [], 0
        if block.kind == "title":
            heading = block.text
        elif block.kind != "module" and len(text) <= limit:
            parts.append(text)
            size += len(text)
    yield from flush()


def docs_pages(docs: Path) -> Iterator[tuple[str, list[Block]]]:
    """Every page of the documentation's sources by name, except the C API, the oldest whatsnew pages and the generated ones."""
    for path in sorted(docs.rglob("*.rst.txt")):
        page = path.relative_to(docs).as_posix().removesuffix(".rst.txt")
        if page.split("/")[0] not in ("c-api", "extending", "install", "distutils", "includes", "license"):
            yield page, parse(path.read_text(encoding="utf-8"))


def _documented(tree: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            dotted = f"{name}.{node.name}"
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            if text := ast.get_docstring(node):
                yield kind, dotted, text
            if kind == "class":
                yield from _documented(node, dotted)


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def docstring_facts(stdlib: Path) -> Iterator[Fact]:
    """Facts from the docstrings of the standard library's public modules, read without importing them."""
    excluded = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if excluded.intersection(parts) or any(p.startswith("_") and p != "__init__.py" for p in parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = _module_name(path, stdlib)
        for kind, name, text in _documented(tree, module):
            first = inline(text.strip().split("\n\n")[0])
            answer = sentences(first if first.endswith((".", "!", "?")) else first + ".", 300)
            if len(answer) >= 20 and ">>>" not in answer:
                yield Fact(kind, name, about(name, answer), "", f"docstring/{module}")


def unique(facts: Iterable[Fact]) -> list[Fact]:
    """The first fact for each subject and the first for each answer, in order."""
    subjects: set[str] = set()
    answers: set[str] = set()
    kept = []
    for fact in facts:
        if fact.subject.lower() not in subjects and ascii_text(fact.answer) not in answers:
            subjects.add(fact.subject.lower())
            answers.add(fact.answer)
            kept.append(fact)
    return kept
