"""How a request ends, especially before its answer is complete: finish reason, cause, and the error its client receives."""

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
class RequestEnd:
    """How a request ended. `cause` tells why it ended early if `finish_reason` does not. `error` is sent to the client."""

    finish_reason: str
    cause: str | None = None
    error: GatehouseError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a generation. `finish_reason` is the one of the ledger, `finish_reasons` are those of the answers in order.
    `error` is what the client receives, None after success."""

    finish_reason: str
    usage: Usage
    error: GatehouseError | None = None
    finish_reasons: tuple[str, ...] = ()


def with_client_field_name(message: str, param: str, field_names: Mapping[str, str]) -> tuple[str, str]:
    """Return the engine's error message about its field `param`, and the field, both under the name that the client used."""
    name = field_names.get(param, param)
    return (f"{name}{message.removeprefix(param)}" if message.startswith(f"{param} ") else message), name


def _tenant_error(change: str) -> TenantSuspended:
    return TenantSuspended(f"the tenant of this key was {change} while the request ran; it was ended")


# reason -> finish reason and cause in the ledger, and a factory of the client's error (a shared exception would keep its
# traceback). A client that disconnected receives none.
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
    "tenant_suspended": ("aborted", "tenant_suspended", lambda: _tenant_error("suspended")),
    "tenant_archived": ("aborted", "tenant_archived", lambda: _tenant_error("archived")),
    "budget_exceeded": (
        "aborted",
        "budget_exceeded",
        lambda: BudgetExceeded("the budget of this month was used up while the request ran; it was ended"),
    ),
}
EARLY_ENDS = tuple(_EARLY_ENDS)


def early_end(reason: str) -> RequestEnd:
    """Return the end of a request that was ended from outside. `reason` is one of EARLY_ENDS; others raise KeyError."""
    finish_reason, cause, make_error = _EARLY_ENDS[reason]
    return RequestEnd(finish_reason=finish_reason, cause=cause, error=make_error())
