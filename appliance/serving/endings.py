"""How a request ends, above all before its answer is complete: what the ledger writes, why, and what its client is told."""

from __future__ import annotations

from collections.abc import Mapping
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


def early(why: str) -> Ended:
    """Return the end of a request that somebody or something ended from outside. Raises KeyError for a reason that is none."""
    finish_reason, cause = _ENDS[why]
    return Ended(finish_reason=finish_reason, cause=cause, error=_told(why))


def as_written(message: str, param: str, field_names: Mapping[str, str]) -> tuple[str, str]:
    """Return the engine's refusal of its field `param`, and that field, both in the name that the client used for it."""
    name = field_names.get(param, param)
    return (f"{name}{message.removeprefix(param)}" if message.startswith(f"{param} ") else message), name


_ENDS: Mapping[str, tuple[str, str]] = {
    "disconnected": ("disconnected", "client"),
    "aborted": ("aborted", "administrator"),
    "deadline": ("deadline", "request_deadline"),
    "shutdown": ("aborted", "shutdown"),
    "key_revoked": ("aborted", "key_revoked"),
    "key_expired": ("aborted", "key_expired"),
    "tenant_suspended": ("aborted", "tenant_suspended"),
    "tenant_archived": ("aborted", "tenant_archived"),
    "budget_exceeded": ("aborted", "budget_exceeded"),
}
EARLY_ENDS = tuple(_ENDS)


def _told(why: str) -> GatehouseError | None:
    """Return what the client is told, each time anew: an error that is kept would keep its traceback. One that has left is told
    nothing."""
    match why:
        case "disconnected":
            return None
        case "deadline":
            return DeadlineExceeded("the request ran longer than request_deadline_s allows and was ended")
        case "shutdown":
            return Draining("the appliance is shutting down and ended the request", retry_after_s=RETRY_AFTER_DRAINING_S)
        case "key_revoked":
            return InvalidApiKey("the API key was revoked while the request ran; it was ended")
        case "key_expired":
            return ExpiredApiKey("the API key expired while the request ran; it was ended")
        case "tenant_suspended" | "tenant_archived":
            return TenantSuspended(
                f"the tenant of this key was {why.removeprefix('tenant_')} while the request ran; it was ended"
            )
        case "budget_exceeded":
            return BudgetExceeded("the budget of this month was used up while the request ran; it was ended")
        case _:
            return RequestAborted("the request was ended by an administrator")
