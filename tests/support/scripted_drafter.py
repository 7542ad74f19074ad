"""A drafter whose drafts are right up to a given depth."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop import Engine
from engine.scheduling.drafting import Draft
from engine.scheduling.request import Request
from tests.support.tiny_models import VOCAB_SIZE

WRONG_TOKEN = VOCAB_SIZE - 1


class ScriptedDrafter:
    """Drafts `depth` tokens of a known answer, all right but the last."""

    def __init__(self, answer: Sequence[int], depth: int) -> None:
        self._answer = answer
        self._depth = depth

    def pays(self, num_running: int) -> bool:
        return True

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        num_generated = request.num_output_tokens
        draft_ids = [*self._answer[num_generated : num_generated + self._depth - 1], WRONG_TOKEN][:limit]
        return Draft(len(draft_ids), draft_ids)

    def read(self, num_running: int) -> None:
        """Do nothing: it reads no text."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: it does not adapt."""


def use_scripted_drafter(engine: Engine, answer: Sequence[int], depth: int) -> None:
    """Make the engine draft with a `ScriptedDrafter`."""
    drafting = engine._scheduler._drafting
    assert drafting is not None
    drafting._drafter = ScriptedDrafter(answer, depth)
