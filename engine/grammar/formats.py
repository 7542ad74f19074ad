"""The formats of JSON Schema as regular languages, each by its own standard. Knows no schema.

A format outside this list is an annotation (JSON Schema 2020-12 Validation, section 7.2.3) and constrains nothing.
"""

from __future__ import annotations

import functools

from engine.grammar.patterns import full_language
from engine.grammar.regex import ANY_CHAR, Regex, intersection, repeat

# RFC 3339. Days of a month and leap years are exact; the year 0000 and leap seconds, which many readers refuse, are left out.
_DATE = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

# RFC 3339, appendix A.
_DURATION = (
    "P(?:(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
    "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
    "|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)|[0-9]+W)"
)

# RFC 1123; the limit of 253 characters for the whole name is checked separately.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_HOSTNAME_LENGTH_MAX = 253

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"

# RFC 3986, appendix A.
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    f"(?:(?:{_H16}:){{6}}{_LS32}|::(?:{_H16}:){{5}}{_LS32}|(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}"
    f"|(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}|(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}"
    f"|(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}|(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}"
    f"|(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}|(?:(?:{_H16}:){{0,6}}{_H16})?::)"
)
# RFC 3987, section 2.2: what an IRI adds to the unreserved characters (the same everywhere; private use only in queries).
_UCS = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\u{10000}-\u{1FFFD}\u{20000}-\u{2FFFD}\u{30000}-\u{3FFFD}"


def _uri(extra: str, *, relative: bool) -> str:
    unreserved = f"A-Za-z0-9._~{extra}"
    coded = "%[0-9A-Fa-f]{2}"
    pchar = f"(?:[{unreserved}!$&'()*+,;=:@-]|{coded})"
    segment_without_colon = f"(?:[{unreserved}!$&'()*+,;=@-]|{coded})+"
    user = f"(?:[{unreserved}!$&'()*+,;=:-]|{coded})*"
    name = f"(?:[{unreserved}!$&'()*+,;=-]|{coded})*"
    literal = rf"\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"
    authority = f"(?:{user}@)?(?:{literal}|{name})(?::[0-9]*)?"
    absolute_path = f"/(?:{pchar}+(?:/{pchar}*)*)?"
    tail = rf"(?:\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    hierarchy = f"(?://{authority}(?:/{pchar}*)*|{absolute_path}|{pchar}+(?:/{pchar}*)*|)"
    whole = f"[A-Za-z][A-Za-z0-9+.-]*:{hierarchy}{tail}"
    if not relative:
        return whole
    relative_reference = f"(?://{authority}(?:/{pchar}*)*|{absolute_path}|{segment_without_colon}(?:/{pchar}*)*|)"
    return f"(?:{whole}|{relative_reference}{tail})"


# RFC 6570.
_VARIABLE_CHAR = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_VARIABLE = rf"{_VARIABLE_CHAR}(?:\.?{_VARIABLE_CHAR})*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE_LITERAL = rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~{_UCS}\uE000-\uF8FF]|%[0-9A-Fa-f]{{2}})"
_URI_TEMPLATE = rf"(?:{_TEMPLATE_LITERAL}|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

# RFC 5321: a dot-string or a quoted string, at a domain.
_ATOM = "A-Za-z0-9!#$%&'*+/=?^_`{|}~-"
_MAIL_HOST = rf"(?:{_HOSTNAME}|\[{_IPV4}\])"


def _email(extra: str, host: str) -> str:
    local = rf"[{extra}{_ATOM}]+(?:\.[{extra}{_ATOM}]+)*"
    quoted = rf'"(?:[{extra}\x20-\x21\x23-\x5B\x5D-\x7E]|\\[\x20-\x7E])*"'
    return f"(?:{local}|{quoted})@{host}"


_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_UUID = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _email("", _MAIL_HOST),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _uri("", relative=False),
    "uri-reference": _uri("", relative=True),
    "iri": _uri(_UCS, relative=False),
    "iri-reference": _uri(_UCS, relative=True),
    "uri-template": _URI_TEMPLATE,
    "uuid": _UUID,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
REFUSED = frozenset({"regex", "idn-hostname", "idn-email"})
"""Standard formats that no regular language of reasonable size expresses."""


@functools.cache
def format_language(name: str) -> Regex | None:
    """The texts that a format allows; None when the name is an annotation. Schemas with one of `REFUSED` do not get here."""
    pattern = _PATTERNS.get(name)
    if pattern is None:
        return None
    language = full_language(pattern)
    return intersection(language, repeat(ANY_CHAR, 0, _HOSTNAME_LENGTH_MAX)) if name == "hostname" else language
