"""Guesses that are right for as long as a test wants them to be."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop import Engine
from engine.scheduling.drafting import Draft
from engine.scheduling.request import Request
from tests.support.tiny_models import VOCAB_SIZE

WRONG_TOKEN = VOCAB_SIZE - 1


class ScriptedDrafter:
    """Guesses what every request is going to say, but for the last of `depth` tokens."""

    def __init__(self, answer: Sequence[int], depth: int) -> None:
        self._answer = answer
        self._depth = depth

    def pays(self, num_running: int) -> bool:
        return True

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        num_generated = request.num_output_tokens
        guesses = [*self._answer[num_generated : num_generated + self._depth - 1], WRONG_TOKEN][:limit]
        return Draft(len(guesses), guesses)

    def read(self, num_running: int) -> None:
        """It has no text to read."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """It will not learn."""


def use_scripted_drafter(engine: Engine, answer: Sequence[int], depth: int) -> None:
    """Have the engine guess by `ScriptedDrafter`."""
    drafting = engine._scheduler._drafting
    assert drafting is not None
    drafting._drafter = ScriptedDrafter(answer, depth)
