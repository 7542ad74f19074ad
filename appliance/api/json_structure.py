"""How many structural characters a JSON text has, counted before it is read: they, not its bytes, are what reading costs.

A text of 10 MiB is read in some 10 ms where it is one string, and in over a second where it is lists of nothing. What stands in
strings is not counted, so a prompt may hold any number of commas and brackets. Knows no field and no request.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from appliance.base.errors import RequestTooLarge

STRUCTURE_MAX = 200_000
"""Some 30 ms of reading. Messages, parts, a schema and all else, each at its own limit, come to less together."""

_STRUCTURAL = b"{}[]:,"  # RFC 8259, section 2
_SLICE_BYTES = 64 * 1024  # counted in a millisecond at most, whatever they are
_AT_ONCE_S = 0.001


async def check_structure(text: bytes) -> None:
    """Raise RequestTooLarge for a text with more than STRUCTURE_MAX structural characters. Others run each _AT_ONCE_S.

    A text with more strings than so many characters could part is no JSON: its reader finds that out before their end.
    """
    if len(text) <= STRUCTURE_MAX:
        return
    count, began_s = StructureCount(), time.perf_counter()
    while count.end < len(text) and count.quotes <= 2 * STRUCTURE_MAX + 2:
        count.take_slice(text)
        if count.structural > STRUCTURE_MAX:
            raise RequestTooLarge(
                f"the body has more than {STRUCTURE_MAX} structural characters of JSON (braces, brackets, colons and commas"
                " outside strings); no valid request needs that many"
            )
        if time.perf_counter() - began_s >= _AT_ONCE_S:
            await asyncio.sleep(0)
            began_s = time.perf_counter()


@dataclass(slots=True)
class StructureCount:
    """The count up to `end`, which never lies within an escape. What is no JSON is counted in some way: its reader finds that
    out no later than where the count is wrong."""

    end: int = 0
    structural: int = 0
    quotes: int = 0
    in_string: bool = False

    def take_slice(self, text: bytes) -> None:
        """Count on for _SLICE_BYTES."""
        begin, self.end = self.end, min(self.end + _SLICE_BYTES, len(text))
        part = text[begin : self.end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the escape goes on; nothing else that ends so has a quote behind it
            part += text[self.end : self.end + 1]
            self.end += 1
        if b"\\" in part:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a string
        pieces = part.split(b'"')
        outside = b"".join(pieces[self.in_string :: 2])
        self.structural += len(outside) - len(outside.translate(None, _STRUCTURAL))
        self.quotes += len(pieces) - 1
        self.in_string ^= len(pieces) % 2 == 0
