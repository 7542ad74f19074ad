"""The current actor: set where a request, command or background task begins, read where a change is written to the audit log.

It is a context variable, like the request id in the log: every change must name its author, and an argument passed through
every service would be forgotten in one of them. The default actor is the appliance itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

ActorKind = Literal["member", "token", "cli", "key", "system"]


OPERATOR_HEADER = "x-gatehouse-operator"
"""Names the user who runs a command. Trusted only with the control token, which only the owner of its file can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The author of a change. `name` is an e-mail address or a token name; `address` is the client address of the request."""

    kind: ActorKind
    name: str
    id: str | None = None
    request_id: str | None = None
    address: str | None = None


SYSTEM = Actor(kind="system", name="appliance")
_actor: ContextVar[Actor] = ContextVar("gatehouse_actor", default=SYSTEM)


def current_actor() -> Actor:
    """Return the actor of this task."""
    return _actor.get()


def act_as(actor: Actor) -> None:
    """Set the actor of this task, and of the tasks that it starts from now on."""
    _actor.set(actor)


@contextmanager
def acting(actor: Actor) -> Iterator[None]:
    """Set the actor inside the block; restore the previous one afterwards."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)
