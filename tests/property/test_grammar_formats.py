"""Texts near those of each format: its pattern matches exactly what another reader of the same standard accepts."""

from __future__ import annotations

import ipaddress
import re
import string
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
READERS: dict[str, tuple[Reader, str, list[str]]] = {  # another reader, the characters of edits, valid texts to edit
    "date": (is_date, "0123456789-", ["2024-02-29", "2000-02-29", "1900-02-28", "1999-12-31", "0400-04-30", "9996-10-01"]),
    "time": (is_time, "0123456789:.Zz+-", ["12:00:00Z", "23:59:59.5+01:00", "09:19:09z", "00:00:00-23:59"]),
    "date-time": (is_date_time, "0123456789:.Zz+-Tt ", ["2022-01-01T12:00:00Z", "2024-02-29t23:59:59.123-08:00"]),
    "duration": (is_duration, "0123PTYMDHSW", ["P1D", "PT1H30M", "P1Y2M3DT4H5M6S", "P20W", "P3M1D", "PT5M6S", "P1Y", "P2DT3S"]),
    "email": (is_email, "aZ9.@\"\\ -_!#[]é", ["a.b@c.de", "a+b@localhost", '"a b\\"c"@d.e', "x@[127.0.0.1]"]),
    "hostname": (is_hostname, "aZ9-._", ["a.b-c.example", "xn--bcher-kva.de", "a" * 63 + ".b"]),
    "ipv4": (lambda text: is_address(text, 4), "0123456789.", ["0.0.0.0", "255.1.2.3", "199.249.250.99", "10.20.100.200"]),
    "ipv6": (
        lambda text: is_address(text, 6),
        "0123aF:.",
        ["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "fe80::aB:12", "1:2:3:4:5:6:77.88.99.100", "1:2::", "::", "1:2:3::6:7:8",
         "1:2:3:4:5::8", "1::3:4:5:6:7", "1:2:3:4:5:6::8"],
    ),
    "uri": (
        lambda text: is_reference(text, absolute=True),
        "aZ9:/?#[]@!%4.+-_~'é \\",
        ["https://a.b/c?d#e", "mailto:a@b", "urn:x:y", "http://u:p@[::1]:80/a/?b/?#c/?", "a+1.-:/", "x://[v1.a:b]", "a:%4aB//"],
    ),
    "uri-reference": (
        lambda text: is_reference(text, absolute=False),
        "aZ9:/?#[]@!%4.+-_~'é \\",
        ["../a", "", "Core", "//h/p", "/a//b", "?q", "#f", "a/b:c@d", "//u@h:8/x?y=1#z", "%4a/b", "https://a.b/c?d#e"],
    ),
    "uri-template": (
        is_uri_template,
        "aZ9_{}+#./;?&=,!@|:*%4'é ",
        ["http://e.com/{a,b}/{?q*}", "{+path:10}/x", "{#a.b,c%4a}", "{/v*}{;w}", "a[b]~"],
    ),
    "uuid": (is_uuid, "0aFg-", ["123e4567-e89b-12d3-a456-426614174000", "ABCDEF01-2345-6789-abcd-ef0123456789"]),
    "json-pointer": (is_pointer, "/~012a é", ["", "/a~1b/0", "/~0/", "//"]),
    "relative-json-pointer": (is_relative_pointer, "/~0129#a", ["0", "1/a", "10#", "0/~1b/", "25"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_format_accepts_what_another_reader_of_its_standard_accepts(name: str, data: st.DataObject) -> None:
    reads, characters, texts = READERS[name]
    text = data.draw(st.sampled_from(texts), label="valid text")
    for _ in range(data.draw(st.integers(0, 3), label="edits")):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 2))
        inserted = data.draw(st.text(characters, max_size=2))
        text = text[:start] + inserted + text[start + length :]
    language = format_language(name)
    assert language is not None
    assert matches(language, text) == reads(text), text


@pytest.mark.parametrize(("length", "is_valid"), [(253, True), (254, False)])
def test_a_hostname_has_at_most_253_characters(length: int, is_valid: bool) -> None:
    language = format_language("hostname")
    assert language is not None
    assert matches(language, ".".join(["a" * 63] * 4)[:length].ljust(length, "a")) is is_valid


@pytest.mark.parametrize("name", READERS)
def test_the_texts_that_are_edited_are_valid(name: str) -> None:
    reads, _, texts = READERS[name]
    assert [text for text in texts if not reads(text)] == []


@pytest.mark.parametrize(("name", "plain"), [("iri", "uri"), ("iri-reference", "uri-reference")])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_iri_is_a_uri_in_which_further_characters_are_unreserved(name: str, plain: str, data: st.DataObject) -> None:
    reads, characters, texts = READERS[plain]
    text = data.draw(st.sampled_from(texts))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.sampled_from(["é", "日", "𐀀", "x", *characters])) + text[start:]
    language = format_language(name)
    assert language is not None
    assert matches(language, text) == reads(re.sub("[é日𐀀]", "_", text)), text


def test_every_format_has_another_reader() -> None:
    assert {*_PATTERNS} - {*READERS} == {"iri", "iri-reference"}
