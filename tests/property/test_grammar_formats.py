"""Texts near those of each format: its pattern matches exactly what another reader of the same standard accepts."""

from __future__ import annotations

import ipaddress
import itertools
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date

import pytest

from engine.grammar.formats import _PATTERNS, format_language
from engine.grammar.regex import matches

UNRESERVED = string.ascii_letters + string.digits + "-._~"
SUB_DELIMS = "!$&'()*+,;="
ATOM = string.ascii_letters + string.digits + "!#$%&'*+-/=?^_`{|}~"
MAX_LABEL = 63


def are_numbers_below(text: str, *limits: int) -> bool:
    """Whether `text` is two digits for each limit, separated by colons, and below it."""
    parts = text.split(":")
    digits = all(len(part) == 2 and part.isascii() and part.isdigit() for part in parts)
    return digits and len(parts) == len(limits) and all(int(part) < limit for part, limit in zip(parts, limits, strict=True))


def is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        return False
    with suppress(ValueError):
        return bool(date.fromisoformat(text))
    return False


def is_time(text: str) -> bool:
    clock, offset = (text[:-1], "") if text[-1:] in ("Z", "z") else (text[:-6], text[-6:])
    whole, dot, fraction = clock.partition(".")
    if offset and not (offset.startswith(("+", "-")) and are_numbers_below(offset[1:], 24, 60)):
        return False
    is_fraction = not dot or (fraction.isascii() and fraction.isdigit())
    return is_fraction and are_numbers_below(whole, 24, 60, 60)


def is_date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and is_date(text[:10]) and is_time(text[11:])


def is_duration(text: str) -> bool:
    """RFC 3339, appendix A: units follow each other without a gap, and something is named."""
    if re.fullmatch(r"P\d+W", text, re.ASCII):
        return True
    named = re.fullmatch(r"P((?:\d+[A-Z])*)(?:T((?:\d+[A-Z])+))?", text, re.ASCII)
    if named is None or text == "P":
        return False
    days, times = re.sub(r"\d", "", named[1]), re.sub(r"\d", "", named[2] or "")
    return days in "YMD" and times in "HMS"


def is_hostname(text: str) -> bool:
    return all(
        1 <= len(label) <= MAX_LABEL and set(label) <= {*string.ascii_letters, *string.digits, "-"}
        and not label.startswith("-") and not label.endswith("-")
        for label in text.split(".")
    )  # fmt: skip


def is_address(text: str, version: int) -> bool:
    with suppress(ValueError):
        return "%" not in text and "/" not in text and ipaddress.ip_address(text).version == version
    return False


def is_email(text: str) -> bool:
    local, at, host = text.rpartition("@")
    literal = host.startswith("[") and host.endswith("]") and is_address(host[1:-1], 4)
    is_host = literal or is_hostname(host)
    if local.startswith('"'):
        body = re.fullmatch(r'"((?:[^"\\]|\\.)*)"', local, re.DOTALL)
        is_local = body is not None and all(" " <= character <= "~" for character in body[1])
    else:
        is_local = all(atom and set(atom) <= set(ATOM) for atom in local.split("."))
    return bool(at) and is_host and is_local


def consists_of(text: str, allowed: str) -> bool:
    """Whether `text` has only these characters and percent-encoded bytes."""
    rest = re.sub("%[0-9A-Fa-f]{2}", "", text)
    return set(rest) <= set(allowed)


def is_authority(text: str) -> bool:
    user, at, host = text.rpartition("@")
    if at and not consists_of(user, UNRESERVED + SUB_DELIMS + ":"):
        return False
    if host.startswith("["):
        inner, bracket, port = host[1:].partition("]")
        future = re.fullmatch(r"[vV][0-9A-Fa-f]+\.(.+)", inner)
        is_literal = is_address(inner, 6) or (future is not None and set(future[1]) <= set(UNRESERVED + SUB_DELIMS + ":"))
        return bool(bracket) and is_literal and (not port or re.fullmatch(":[0-9]*", port) is not None)
    name, _, port = host.partition(":")
    return consists_of(name, UNRESERVED + SUB_DELIMS) and re.fullmatch("[0-9]*", port) is not None


def is_reference(text: str, *, absolute: bool) -> bool:
    """RFC 3986, appendix B splits any text; each part has its own characters."""
    parts = re.fullmatch(r"(?:([^:/?#]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", text, re.DOTALL)
    assert parts is not None
    scheme, authority, path, query, fragment = parts.groups()
    if scheme is None and absolute:
        return False
    pchar = UNRESERVED + SUB_DELIMS + ":@"
    return (
        (scheme is None or re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme) is not None)
        and (authority is None or is_authority(authority))
        and consists_of(path, pchar + "/")
        and all(part is None or consists_of(part, pchar + "/?") for part in (query, fragment))
    )


def is_uuid(text: str) -> bool:
    with suppress(ValueError):
        return str(uuid.UUID(text)) == text.lower() and text.isascii()
    return False


def is_pointer(text: str) -> bool:
    return (not text or text.startswith("/")) and re.search("~(?![01])", text) is None


def is_relative_pointer(text: str) -> bool:
    digits = re.match("[0-9]+", text)
    if digits is None or (digits[0] != "0" and digits[0].startswith("0")):
        return False
    return text[digits.end() :] == "#" or is_pointer(text[digits.end() :])


def is_variable(text: str) -> bool:
    name, colon, length = text.removesuffix("*").partition(":")
    if colon and (text.endswith("*") or re.fullmatch("[1-9][0-9]{0,3}", length) is None):
        return False
    return all(part and consists_of(part, string.ascii_letters + string.digits + "_") for part in name.split("."))


def is_uri_template(text: str) -> bool:
    """RFC 6570: literals and expressions in braces."""
    expressions = re.findall(r"\{([^{}]*)\}", text)
    literals = re.sub(r"\{[^{}]*\}", "", text)
    return consists_of(literals, UNRESERVED + SUB_DELIMS.replace("'", "") + ":/?#[]@é") and all(
        is_variable(variable)
        for expression in expressions
        for variable in re.sub(r"^[+#./;?&=,!@|]", "", expression).split(",")
    )


Reader = Callable[[str], bool]
READERS: dict[str, tuple[Reader, list[str]]] = {  # another reader, and valid texts
    "date": (is_date, ["2024-02-29", "1999-12-31"]),
    "time": (is_time, ["12:00:00Z", "23:59:59.5+01:00", "09:19:09z", "00:00:00-23:59"]),
    "date-time": (is_date_time, ["2022-01-01T12:00:00Z", "2024-02-29t23:59:59.123-08:00"]),
    "duration": (is_duration, ["P1Y2M3DT4H5M6S", "P20W", "P3M1D", "PT5M6S", "P1Y", "P2DT3S"]),
    "email": (is_email, ["a.b@c.de", "a+b@localhost", '"a b\\"c"@d.e', "x@[127.0.0.1]"]),
    "hostname": (is_hostname, ["a.b-c.example", "xn--bcher-kva.de", "a" * 63 + ".b"]),
    "ipv4": (lambda text: is_address(text, 4), ["0.0.0.0", "199.249.250.99"]),
    "ipv6": (lambda text: is_address(text, 6), ["1:2:3:4:5:6:7:8", "fe80::aB:12", "1:2::6:77.88.99.100"]),
    "uri": (
        lambda text: is_reference(text, absolute=True),
        ["h://u:p@[::1]:80/a/?b/?#c/?", "http://h:8/%4a", "a+1.-:/", "x://[v1.a:b]", "a:%4aB//", "urn:x:y", "m:a@b"],
    ),
    "uri-reference": (
        lambda text: is_reference(text, absolute=False),
        ["../a", "", "//u@h:8/x?y=1#z", "/a//b", "?q", "#f", "a/b:c@d", "%4a/b", "https://a.b/c?d#e"],
    ),
    "uri-template": (is_uri_template, ["h://e/{a,b}/{?q*}", "{+path:10}/x", "{#a.b,c%4a}", "{/v*}{;w}", "a[b]~"]),
    "uuid": (is_uuid, ["123e4567-e89b-12d3-a456-426614174000"]),
    "json-pointer": (is_pointer, ["", "/a~1b/0", "/~0/", "//"]),
    "relative-json-pointer": (is_relative_pointer, ["0", "1/a", "10#", "0/~1b/", "25"]),
}  # fmt: skip
CHARACTERS = string.printable[:95] + "é\n"


def neighbours(texts: list[str]) -> Iterator[str]:
    """The texts, and those that differ from them in one character: each printable one inserted and replaced somewhere."""
    rng = random.Random(0)
    for text in texts:
        yield text
        yield from (text[:index] + text[index + 1 :] for index in range(len(text)))
        for character in CHARACTERS:
            index, other = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
            yield text[:index] + character + text[index:]
            yield text[:other] + character + text[other + 1 :]


def numbers(name: str) -> Iterator[str]:
    """Texts of a format with all the numbers that matter."""
    if name == "date":
        years = (0, 1, 4, 10, 100, 400, 1000, 1896, 1900, 2000, 2020, 2024, 2100, 2400, 9900, 9996, 9999, *range(2048, 2054))
        yield from (
            f"{y:04}-{m:02}-{d:02}" for y in years for m in range(14) for d in (0, 1, 9, 10, 19, 20, 28, 29, 30, 31, 32)
        )
    elif name == "time":
        yield from (f"{n:02}:00:00{sign}00:{n:02}" for n in range(100) for sign in "+-")
        yield from (f"00:{n:02}:{n - 1:02}.{n}+{n - 36:02}:00" for n in range(36, 62))
    elif name == "ipv4":
        yield from (".".join([*"19"[:place], str(n), *"2003"[place + 1 :]]) for n in range(300) for place in range(4))
    elif name == "ipv6":
        groups = ["aF09", "0", "12", "345", "6789a", "b"]
        for before, after, tail in itertools.product(range(10), range(9), ("", "255.0.99.1")):
            left = ":".join(groups[(before + index) % 4] for index in range(before))
            right = ":".join([groups[(after + index) % 6] for index in range(after)] + [tail] * bool(tail))
            yield from (f"{left}::{right}", f"{left}:{right}")


@pytest.mark.parametrize("name", READERS)
def test_a_format_accepts_what_another_reader_of_its_standard_accepts(name: str) -> None:
    reads, texts = READERS[name]
    language = format_language(name)
    assert language is not None
    differing = [text for text in {*neighbours(texts), *numbers(name)} if matches(language, text) != reads(text)]
    assert differing == []


@pytest.mark.parametrize("name", READERS)
def test_a_text_of_a_format_has_many_valid_and_invalid_neighbours(name: str) -> None:
    reads, texts = READERS[name]
    results = [reads(text) for text in {*neighbours(texts), *numbers(name)}]
    assert all(reads(text) for text in texts)
    assert min(results.count(True), results.count(False)) > 5


@pytest.mark.parametrize(("name", "plain"), [("iri", "uri"), ("iri-reference", "uri-reference")])
def test_an_iri_is_a_uri_in_which_further_characters_are_unreserved(name: str, plain: str) -> None:
    reads, texts = READERS[plain]
    language = format_language(name)
    assert language is not None
    further = {
        text.replace("x", letter).replace("u", letter)
        for text in texts
        for letter in "\xa0\ud7ff\uf900\ufdcf\ufdf0\uffef\U00010000\U0001fffd\U0003fffd"
    }
    for text in {*neighbours(texts), *further}:
        assert matches(language, text) == reads(re.sub("[^ -~\n]", "_", text)), text


@pytest.mark.parametrize(("length", "is_valid"), [(253, True), (254, False)])
def test_a_hostname_has_at_most_253_characters(length: int, is_valid: bool) -> None:
    language = format_language("hostname")
    assert language is not None
    assert matches(language, ".".join(["a" * 63] * 4)[:length].ljust(length, "a")) is is_valid


def test_every_format_has_another_reader() -> None:
    assert {*_PATTERNS} - {*READERS} == {"iri", "iri-reference"}
