"""Counts the structural characters of a JSON text before it is decoded, because decoding time grows with them, not with bytes.

10 MiB are decoded in some 10 ms if they are one string, and in over a second if they are empty lists. Characters in strings are
not counted, so a prompt may contain any number of commas and brackets. Knows no field and no request.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from appliance.base.errors import RequestTooLarge

STRUCTURE_MAX = 200_000
"""Some 30 ms of decoding. A request whose messages, parts, schema and other fields are all at their limits stays below it."""

_STRUCTURAL = b"{}[]:,"  # RFC 8259, section 2
_SLICE_BYTES = 64 * 1024  # counted in a millisecond at most, whatever they contain
_TURN_S = 0.001


async def check_structure(text: bytes) -> None:
    """Raise RequestTooLarge for a text with more than STRUCTURE_MAX structural characters. Other tasks run every _TURN_S.

    Counting stops once there are more strings than STRUCTURE_MAX characters could separate: such a text is not JSON, which the
    decoder finds out before it has read them all.
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
        if time.perf_counter() - began_s >= _TURN_S:
            await asyncio.sleep(0)
            began_s = time.perf_counter()


@dataclass(slots=True)
class StructureCount:
    """The count up to `end`, which is never inside an escape. For invalid JSON the count may be wrong, but the decoder fails no
    later than where it goes wrong."""

    end: int = 0
    structural: int = 0
    quotes: int = 0
    in_string: bool = False

    def take_slice(self, text: bytes) -> None:
        """Count the next _SLICE_BYTES."""
        begin, self.end = self.end, min(self.end + _SLICE_BYTES, len(text))
        part = text[begin : self.end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape continues in the next slice: take its second byte as well
            part += text[self.end : self.end + 1]
            self.end += 1
        if b"\\" in part:
            part = part.replace(rb"\\", b"").replace(rb"\"", b"")  # every remaining quote begins or ends a string
        pieces = part.split(b'"')
        outside = b"".join(pieces[self.in_string :: 2])
        self.structural += len(outside) - len(outside.translate(None, _STRUCTURAL))
        self.quotes += len(pieces) - 1
        self.in_string ^= len(pieces) % 2 == 0
