"""How a request ends, above all before its answer is complete: what the ledger writes, why, and what its client is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.base.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    Draining,
    ExpiredApiKey,
    GatehouseError,
    InvalidApiKey,
    RequestAborted,
    TenantSuspended,
)
from appliance.metering.ledger.records import Usage

RETRY_AFTER_DRAINING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a request ended. `cause` says why it was early, where `finish_reason` alone does not; `error` is for the client."""

    finish_reason: str
    cause: str | None = None
    error: GatehouseError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a generation ended: `finish_reason` as in the ledger, `finish_reasons` of its answers in order, `error` when the
    client must be told of a failure."""

    finish_reason: str
    usage: Usage
    error: GatehouseError | None = None
    finish_reasons: tuple[str, ...] = ()


def as_written(message: str, param: str, field_names: Mapping[str, str]) -> tuple[str, str]:
    """Return the engine's refusal of its field `param`, and that field, both in the name that the client used for it."""
    name = field_names.get(param, param)
    return (f"{name}{message.removeprefix(param)}" if message.startswith(f"{param} ") else message), name


def _tenant_ended(how: str) -> TenantSuspended:
    return TenantSuspended(f"the tenant of this key was {how} while the request ran; it was ended")


# reason -> what the ledger writes as finish reason and as cause, and what the client is told: an error that is made each time,
# because one that is kept would keep its traceback. One that has left is told nothing.
_EARLY_ENDS: Mapping[str, tuple[str, str, Callable[[], GatehouseError | None]]] = {
    "disconnected": ("disconnected", "client", lambda: None),
    "aborted": ("aborted", "administrator", lambda: RequestAborted("the request was ended by an administrator")),
    "deadline": (
        "deadline",
        "request_deadline",
        lambda: DeadlineExceeded("the request ran longer than request_deadline_s allows and was ended"),
    ),
    "shutdown": (
        "aborted",
        "shutdown",
        lambda: Draining("the appliance is shutting down and ended the request", retry_after_s=RETRY_AFTER_DRAINING_S),
    ),
    "key_revoked": (
        "aborted",
        "key_revoked",
        lambda: InvalidApiKey("the API key was revoked while the request ran; it was ended"),
    ),
    "key_expired": (
        "aborted",
        "key_expired",
        lambda: ExpiredApiKey("the API key expired while the request ran; it was ended"),
    ),
    "tenant_suspended": ("aborted", "tenant_suspended", lambda: _tenant_ended("suspended")),
    "tenant_archived": ("aborted", "tenant_archived", lambda: _tenant_ended("archived")),
    "budget_exceeded": (
        "aborted",
        "budget_exceeded",
        lambda: BudgetExceeded("the budget of this month was used up while the request ran; it was ended"),
    ),
}
EARLY_ENDS = tuple(_EARLY_ENDS)


def early(reason: str) -> Ended:
    """Return the end of a request that somebody or something ended from outside, for one of EARLY_ENDS. Raises KeyError."""
    finish_reason, cause, make_error = _EARLY_ENDS[reason]
    return Ended(finish_reason=finish_reason, cause=cause, error=make_error())
