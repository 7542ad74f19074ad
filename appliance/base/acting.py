"""Who acts: set once where a request, a command or a task of our own begins, read where a change is written to the audit log.

It travels in a context variable, as the request id of the log does: every change must name its author, and an argument through
every service would be forgotten in one of them. Whoever sets nothing acts as the appliance itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

ActorKind = Literal["member", "token", "cli", "key", "system"]


OPERATOR_HEADER = "x-gatehouse-operator"
"""Whom a command names. Believed only beside the control token, which the owner of its file alone can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The author of a change. `name` is an e-mail address or the name of a token; `address` where the request came from."""

    kind: ActorKind
    name: str
    id: str | None = None
    request_id: str | None = None
    address: str | None = None


SYSTEM = Actor(kind="system", name="appliance")
_actor: ContextVar[Actor] = ContextVar("gatehouse_actor", default=SYSTEM)


def current_actor() -> Actor:
    """Return who acts in this task."""
    return _actor.get()


def act_as(actor: Actor) -> None:
    """Say who acts from here on in this task, and in the tasks that it starts."""
    _actor.set(actor)


@contextmanager
def acting(actor: Actor) -> Iterator[None]:
    """Let `actor` act inside the block."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)
