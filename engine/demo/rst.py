"""Reads the subset of reStructuredText that Python's documentation uses into plain blocks; knows nothing of training."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from dataclasses import dataclass

ENTRY_KINDS = frozenset(
    [
        "function", "method", "class", "attribute", "data", "exception", "classmethod", "staticmethod", "decorator",
        "decoratormethod", "coroutinefunction", "coroutinemethod", "abstractmethod", "awaitablefunction",
    ]
)  # fmt: skip
CODE_KINDS = frozenset(["code-block", "doctest", "testcode", "sourcecode"])
KEPT_KINDS = frozenset(["note", "warning", "tip", "important", "impl-detail", "glossary", "rubric", "hint"])

SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)\s+(?=[A-Z`\"'(])")
_LABEL = "\x01"
_DIRECTIVE = re.compile(r"^\s*\.\. ([\w:-]+)::\s*(.*)$")
_BULLET = re.compile(r"^(\*|-|\d+\.|#\.|\(\d+\))\s+")
_BORDER = re.compile(r"^\s*=+( +=+)+\s*$")
_UNDERLINE = re.compile(r"^([=\-~^\"*.+#'`])\1{2,}\s*$")
_ROLE = re.compile(r":[a-z:+-]+:`([^`]*)`", re.S)
_LINK = re.compile(r"`([^`<]+?)\s*<[^>]*>`_{0,2}", re.S)
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--"})


@dataclass(frozen=True)
class Block:
    """One block of a page. kind is title, para, code, term, module, or one of ENTRY_KINDS; extra is a synopsis."""

    kind: str
    indent: int
    text: str
    extra: str = ""


def ascii_text(text: str) -> str:
    """The text in ASCII: typographic quotes replaced, accents dropped, anything else left out."""
    folded = unicodedata.normalize("NFKD", text.translate(_QUOTES))
    return folded.encode("ascii", "ignore").decode("ascii")


def _role_text(match: re.Match[str]) -> str:
    body, whole = match.group(1), match.group(0)
    shown = re.match(r"^(.*?)\s*<[^>]+>$", body, re.S)
    name = shown.group(1) if shown else body.lstrip("!")
    if name.startswith("~"):
        name = name.rsplit(".", 1)[-1]
    if whole.startswith(":pep:"):
        return f"PEP {name}"
    if whole.startswith((":ref:", ":doc:")) and not shown:
        return _LABEL
    if re.match(r":(term|ref|doc|dfn|abbr|rfc|manpage|issue|source|cve|token|gh):", whole):
        return f"RFC {name}" if whole.startswith(":rfc:") else name
    return f"`{name}`"


def _plain(text: str) -> str:
    """Text between code spans, without emphasis, footnotes, substitutions and escapes."""
    text = re.sub(r"\s*\[[#\w*-]*\]_", "", text)
    text = re.sub(r"\|([A-Za-z][\w ]*)\|", r"\1", text)
    text = re.sub(r"\*\\\*(\w+)\*", r"*\1", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1", text)
    text = re.sub(r"\*([^*\s][^*]*)\*", r"\1", text)
    return text.replace("\\ ", "").replace("\\*", "*").replace("\\", "")


def inline(text: str) -> str:
    """Running text without markup; code keeps single backticks. Sentences that only name a label are left out."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.S)
    text = _ROLE.sub(_role_text, text)
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"`([^`]+)`__?\b", r"\1", text)
    parts = re.split(r"(`[^`]*`)", text)
    text = "".join(part if index % 2 else _plain(part) for index, part in enumerate(parts))
    text = re.sub(r"\s+([).,;])", r"\1", re.sub(r"\s+", " ", text)).strip()
    if _LABEL in text:
        text = " ".join(part for part in SENTENCE_END.split(text) if _LABEL not in part)
    return ascii_text(text)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


class _Page:
    """Walks the lines of one page once; `blocks` is the result."""

    def __init__(self, text: str) -> None:
        self.lines = text.expandtabs(8).splitlines()
        self.index = 0
        self.blocks: list[Block] = []

    def walk(self) -> list[Block]:
        while self.index < len(self.lines):
            line = self.lines[self.index]
            stripped = line.strip()
            if not stripped:
                self.index += 1
            elif found := _DIRECTIVE.match(line):
                self._directive(_indent(line), found.group(1), found.group(2))
            elif (stripped.startswith("..") and (len(stripped) == 2 or stripped[2] == " ")) or stripped.startswith("+-"):
                self._body(_indent(line))
            elif _BORDER.match(line):
                self._table()
            elif _UNDERLINE.match(stripped):
                self.index += 1
            else:
                self._text(line)
        return self.blocks

    def _add(self, kind: str, indent: int, text: str, extra: str = "") -> None:
        if text.strip():
            self.blocks.append(Block(kind, indent, text, extra))

    def _body(self, indent: int) -> list[str]:
        """Consumes the current line and everything indented below it; returns the lines below."""
        start = self.index + 1
        self.index = start
        while self.index < len(self.lines):
            line = self.lines[self.index]
            if line.strip() and _indent(line) <= indent and not line.strip().startswith("+-"):
                break
            self.index += 1
        return self.lines[start : self.index]

    def _table(self) -> None:
        borders = 1
        self.index += 1
        while self.index < len(self.lines):
            line = self.lines[self.index]
            if not line.strip() and (borders >= 3 or (borders == 2 and _BORDER.match(self.lines[self.index - 1]))):
                return
            borders += bool(_BORDER.match(line))
            self.index += 1

    def _directive(self, indent: int, name: str, argument: str) -> None:
        if name in ENTRY_KINDS:
            self._entry(indent, name, argument)
        elif name in CODE_KINDS:
            self._code(indent, self._body(indent))
        elif name == "module":
            body = " ".join(part.strip() for part in self._body(indent))
            found = re.search(r":synopsis:\s*([^:]+)", body)
            self._add("module", indent, argument.strip(), inline(found.group(1)) if found else "")
        elif name in ("currentmodule", "py:currentmodule"):
            self.index += 1
            self._add("module", indent, argument.strip())
        elif name in KEPT_KINDS:
            self.index += 1
            if argument:
                self._add("para", indent + 3, inline(" ".join([argument, *self._until_blank()])))
        else:
            self._body(indent)

    def _until_blank(self) -> list[str]:
        start = self.index
        while self.index < len(self.lines) and self.lines[self.index].strip():
            self.index += 1
        return self.lines[start : self.index]

    def _entry(self, indent: int, kind: str, argument: str) -> None:
        self.index += 1
        signature = argument
        for line in self._until_blank():
            if signature.rstrip().endswith("\\"):
                signature = signature.rstrip()[:-1] + " " + line.strip()
        text = ascii_text(re.sub(r"\s+", " ", signature.replace("\\*", "*")).strip())
        self._add(kind, indent, re.sub(r"^(async|abstractmethod|classmethod|property)\s+", "", text))

    def _code(self, indent: int, body: list[str]) -> None:
        while body and (not body[0].strip() or body[0].strip().startswith(":")):
            body = body[1:]
        code = textwrap.dedent("\n".join(body)).strip("\n")
        self._add("code", indent, ascii_text(code.rstrip()))

    def _text(self, line: str) -> None:
        indent = _indent(line)
        below = self.lines[self.index + 1] if self.index + 1 < len(self.lines) else ""
        if indent == 0 and _UNDERLINE.match(below.strip()) and len(below.strip()) >= len(line.strip()) - 1:
            self._add("title", 0, inline(line))
            self.index += 2
            return
        if line.strip().startswith(">>>"):
            self._code(indent, self._until_blank())
            return
        if _BULLET.match(line.strip()):
            self._paragraph(indent, self._bullet(indent), "- ")
            return
        if below.strip() and _indent(below) > indent:
            self._add("term", indent, inline(line))
            self.index += 1
            return
        start = self.index
        while self.index < len(self.lines) and self.lines[self.index].strip() and _indent(self.lines[self.index]) == indent:
            self.index += 1
        self._paragraph(indent, self.lines[start : self.index], "")

    def _bullet(self, indent: int) -> list[str]:
        first = _BULLET.sub("", self.lines[self.index].strip())
        start = self.index + 1
        self.index = start
        while self.index < len(self.lines) and self.lines[self.index].strip() and _indent(self.lines[self.index]) > indent:
            self.index += 1
        return [first, *self.lines[start : self.index]]

    def _paragraph(self, indent: int, lines: list[str], prefix: str) -> None:
        text = " ".join(part.strip() for part in lines)
        literal = text.endswith("::")
        if literal:
            text = text[:-1].rstrip() if len(text) > 2 else ""
        if not re.match(r"^:[\w ]+:", text) and not text.startswith("|"):
            self._add("para", indent, prefix + inline(text) if text else "")
        if literal:
            self.index -= 1
            self._code(indent, self._body(indent))


def parse(text: str) -> list[Block]:
    """The blocks of one page, in order. Tables, comments, footnotes and version notes are left out."""
    return _Page(text).walk()
