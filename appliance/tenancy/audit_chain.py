"""The hash chain of the audit log: computes hashes and verifies that entries form an unbroken chain. Knows no database.

hash(n) = SHA-256(hash(n - 1) + the entry's other columns as canonical JSON), both in UTF-8; hash(0) is 64 zeros. Ids count from
1 without gaps. The head stores the number of entries and the last hash, so that truncation is detected as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from typing import Any

FIRST_HASH = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One row of the audit log. `before` and `after` are canonical JSON, or None."""

    id: int
    at: datetime
    actor_kind: str
    actor_id: str | None
    actor_name: str
    action: str
    target_kind: str
    target_id: str
    tenant_id: str | None
    before: str | None
    after: str | None
    request_id: str | None
    address: str | None
    previous_hash: str
    hash: str


COLUMNS = tuple(field.name for field in fields(AuditEntry))


def decode_fields(text: str | None) -> dict[str, Any] | None:
    """Decode `before` or `after` of an entry."""
    decoded: dict[str, Any] | None = None if text is None else json.loads(text)
    return decoded


@dataclass(frozen=True, slots=True)
class Head:
    """The number of entries ever written, and the hash of the last one."""

    entries: int = 0
    hash: str = FIRST_HASH


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first invalid entry. `kind`: added, removed, changed, replaced, cut, beyond_head or not_expected."""

    entry_id: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification. `fault` is None if no entry is missing and all are as they were written."""

    entries: int
    hash: str
    fault: Fault | None


def canonical_json(value: object) -> str:
    """Return `value` as JSON with sorted keys and no spaces; times are RFC 3339 in UTC with microseconds.

    A lone surrogate, which UTF-8 cannot encode, is written as its escape sequence.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_encode)
    return text.encode("utf-8", "backslashreplace").decode()


def rfc3339_micros(moment: datetime) -> str:
    """Return `moment` in the form that is hashed: RFC 3339 in UTC with microseconds and a `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def hash_of(columns: Mapping[str, Any], previous_hash: str) -> str:
    """Return the hash of an entry; its own `hash` and `previous_hash` columns are ignored."""
    content = {name: value for name, value in columns.items() if name not in ("hash", "previous_hash")}
    return hashlib.sha256(previous_hash.encode() + canonical_json(content).encode()).hexdigest()


class ChainVerifier:
    """Verifies entries in order of id, batch by batch, up to the first fault."""

    def __init__(self, expect: str | None = None) -> None:
        self._expect = expect
        self._found_expected = expect is None
        self.seen = Head()
        self.fault: Fault | None = None

    def feed(self, entries: Iterable[AuditEntry]) -> None:
        """Verify the next entries; after a fault they are ignored."""
        for entry in entries:
            if self.fault is None:
                self.fault = self._fault_of(entry)
            if self.fault is not None:
                return
            self.seen = Head(entry.id, entry.hash)
            self._found_expected = self._found_expected or entry.hash == self._expect

    def finish(self, head: Head) -> Verification:
        """Compare the end of the chain with `head`, read in the same snapshot as the last entries, and return the result."""
        if self.fault is None:
            self.fault = self._fault_of_end(head)
        return Verification(entries=self.seen.entries, hash=self.seen.hash, fault=self.fault)

    def _fault_of(self, entry: AuditEntry) -> Fault | None:
        expected = self.seen.entries + 1
        if entry.id < expected:
            return Fault(entry_id=entry.id, kind="added", text=f"entry {entry.id} was added: the log begins with 1")
        if entry.id > expected:
            return Fault(
                entry_id=expected, kind="removed", text=_missing(expected, entry.id - 1, "was removed", "were removed")
            )
        if not _is_as_hashed(entry):
            return changed_fault(entry.id)
        if entry.previous_hash != self.seen.hash:
            before = entry.id - 1
            text = f"entry {entry.id} does not follow entry {before}: one of them was replaced and its hash recomputed"
            return Fault(entry_id=entry.id, kind="replaced", text=text)
        return None

    def _fault_of_end(self, head: Head) -> Fault | None:
        seen = self.seen
        if head.entries > seen.entries:
            text = _missing(seen.entries + 1, head.entries, "was cut off at the end", "were cut off at the end")
            return Fault(entry_id=seen.entries + 1, kind="cut", text=text)
        if head.entries < seen.entries:
            text = _missing(head.entries + 1, seen.entries, "was added past the head", "were added past the head")
            return Fault(entry_id=head.entries + 1, kind="beyond_head", text=text)
        if head.hash != seen.hash:
            return Fault(entry_id=seen.entries, kind="replaced", text=f"entry {seen.entries}, the last one, was replaced")
        if not self._found_expected:
            text = f"no entry has the hash {self._expect}: the log was rewritten, or cut before that entry"
            return Fault(entry_id=seen.entries, kind="not_expected", text=text)
        return None


def changed_fault(entry_id: int) -> Fault:
    """Return the fault for an entry that does not match its hash or cannot be decoded."""
    return Fault(entry_id=entry_id, kind="changed", text=f"entry {entry_id} was changed")


def _is_as_hashed(entry: AuditEntry) -> bool:
    try:
        return hash_of({name: getattr(entry, name) for name in COLUMNS}, entry.previous_hash) == entry.hash
    except (TypeError, ValueError, AttributeError):
        return False  # SQLite may hold a value of another type in any column


def _missing(first: int, last: int, one: str, many: str) -> str:
    return f"entry {first} {one}" if first == last else f"entries {first} to {last} {many}"


def _encode(value: object) -> object:
    if isinstance(value, datetime):
        return rfc3339_micros(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"the audit log cannot encode a value of type {type(value).__name__}")
