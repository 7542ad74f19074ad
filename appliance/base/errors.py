"""Every error that a caller of the HTTP interface can get.

GatehouseError
├── BadRequest 400 ─── InvalidValue, UnknownParameter, UnsupportedParameter, ContextLengthExceeded
├── Unauthenticated 401 ─── InvalidApiKey, ExpiredApiKey, InvalidCredentials
├── Forbidden 403 ─── ModelNotAllowed, ModelNotPriced, AddressNotAllowed, TenantSuspended, ScopeNotAllowed, RoleNotAllowed,
│                       PasswordChangeNeeded
├── Missing 404 ─── ModelNotFound, NotFound
├── Conflict 409 ─── NameTaken, LastOwner, InvoiceClosed, MonthNotOver, MonthOutOfOrder, CurrenciesMixed,
│                      PriceBegun, NothingToBill
├── RequestTooLarge 413
├── Refused 429 ─── RateLimitExceeded, RequestExceedsLimit, BudgetExceeded
└── ServerError 5xx ─── InternalError 500, EngineUnavailable, ModelLoading, Overloaded, Draining, RequestAborted,
                        DeadlineExceeded, SecretUnreadable 503
"""

from __future__ import annotations

from typing import ClassVar


class GatehouseError(Exception):
    """Base of all errors that reach a caller; `{"error": {"message", "type", "param", "code"}}` is made from its fields."""

    status: ClassVar[int] = 500
    type: str = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry


class BadRequest(GatehouseError):
    """The request cannot be served as it stands; sending it again will not help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidValue(BadRequest):
    """A field has a value outside its limits, or the body is not what the path takes."""


class UnknownParameter(BadRequest):
    """A field that this path does not know."""

    code = "unknown_parameter"


class UnsupportedParameter(BadRequest):
    """A field of OpenAI's interface that this version cannot honour."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(GatehouseError):
    """The caller did not say who it is."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class InvalidApiKey(Unauthenticated):
    """The key is missing, malformed, unknown or revoked."""


class ExpiredApiKey(Unauthenticated):
    """The key was valid until its expiry."""

    code = "expired_api_key"


class InvalidCredentials(Unauthenticated):
    """E-mail address and password do not belong together, or the member may no longer sign in."""

    code = "invalid_credentials"


class Forbidden(GatehouseError):
    """The caller is known and may not do this."""

    status = 403
    type = "permission_error"
    code = "scope_not_allowed"


class ModelNotAllowed(Forbidden):
    """The tenant or key may not use this model."""

    code = "model_not_allowed"


class ModelNotPriced(Forbidden):
    """The model has no price in the tenant's currency, and the box serves nothing without one."""

    code = "model_not_priced"


class AddressNotAllowed(Forbidden):
    """The key may not be used from this address."""

    code = "ip_not_allowed"


class TenantSuspended(Forbidden):
    """The tenant is suspended or archived."""

    code = "tenant_suspended"


class ScopeNotAllowed(Forbidden):
    """The key lacks the scope of this path."""


class RoleNotAllowed(Forbidden):
    """The administrator's role does not cover this action."""

    code = "role_not_allowed"


class PasswordChangeNeeded(Forbidden):
    """Somebody else made the member's password: it must be replaced before anything else."""

    code = "password_change_needed"


class Missing(GatehouseError):
    """What the path or body names does not exist for this caller."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(Missing):
    """No model of that name is served."""

    code = "model_not_found"


class NotFound(Missing):
    """No such path, tenant, key or request."""


class Conflict(GatehouseError):
    """The state on the server contradicts the request."""

    status = 409
    type = "conflict"
    code = "conflict"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, should_retry=False)


class NameTaken(Conflict):
    """Another tenant or member has this name or address."""

    code = "name_taken"


class InvoiceClosed(Conflict):
    """The invoice, or the month, is closed and never changes; what comes later is on the next one."""

    code = "invoice_closed"


class MonthNotOver(Conflict):
    """The month can be drafted and not yet closed."""

    code = "month_not_over"


class NothingToBill(Conflict):
    """The month has no line, and an invoice was asked for only if it has one."""

    code = "nothing_to_bill"


class MonthOutOfOrder(Conflict):
    """A tenant's months are closed in order: an earlier one with usage is still open, or a later one is closed already."""

    code = "month_out_of_order"


class PriceBegun(Conflict):
    """The price is in force, was, or will be within a minute: requests may have been charged at it."""

    code = "price_begun"


class CurrenciesMixed(Conflict):
    """The month has costs in more than one currency, which have no sum."""

    code = "currencies_mixed"


class LastOwner(Conflict):
    """Nobody would be left who may do everything."""

    code = "last_owner"


class RequestTooLarge(GatehouseError):
    """The body is larger than the server accepts."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Refused(GatehouseError):
    """A limit stands in the way. Nothing was consumed."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class RateLimitExceeded(Refused):
    """A limit that frees with time; `retry_after_s` is exact. `limit_type` is `tokens` or `requests`."""

    def __init__(self, message: str, *, limit_type: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.type = limit_type


class RequestExceedsLimit(Refused):
    """The request alone is larger than the limit: waiting cannot help."""

    code = "request_exceeds_limit"

    def __init__(self, message: str, *, limit_type: str) -> None:
        super().__init__(message, should_retry=False)
        self.type = limit_type


class BudgetExceeded(Refused):
    """The monthly budget in money is spent."""

    type = "insufficient_quota"
    code = "budget_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, should_retry=False)


class ServerError(GatehouseError):
    """The fault is on this side."""

    status = 503
    code = "engine_unavailable"


class InternalError(ServerError):
    """A bug. The request id finds the traceback in the log."""

    status = 500
    code = "internal_error"


class EngineUnavailable(ServerError):
    """The engine process is not running or ended in the middle of the request."""


class ModelLoading(ServerError):
    """The model is being loaded."""

    code = "model_loading"


class Overloaded(ServerError):
    """The waiting queue is full, or the database cannot be used now."""

    code = "overloaded"


class Draining(ServerError):
    """The appliance is shutting down and takes no new requests."""

    code = "draining"


class RequestAborted(ServerError):
    """An administrator ended the request. Sending it again by itself would undo that."""

    code = "request_aborted"

    def __init__(self, message: str) -> None:
        super().__init__(message, should_retry=False)


class SecretUnreadable(ServerError):
    """A stored secret was sealed with another `secret.key` than the appliance has: only the operator can mend that."""

    code = "secret_unreadable"

    def __init__(self, message: str) -> None:
        super().__init__(message, should_retry=False)


class DeadlineExceeded(ServerError):
    """The request ran longer than the appliance allows."""

    code = "deadline_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, should_retry=False)
