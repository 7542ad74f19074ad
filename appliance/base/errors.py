"""All errors that a client of the HTTP interface can receive.

GatehouseError
├── BadRequest 400 ─── InvalidValue, UnknownParameter, UnsupportedParameter, ContextLengthExceeded
├── Unauthenticated 401 ─── InvalidApiKey, ExpiredApiKey, InvalidCredentials
├── Forbidden 403 ─── ModelNotAllowed, ModelNotPriced, AddressNotAllowed, TenantSuspended, ScopeNotAllowed, RoleNotAllowed,
│                       PasswordChangeNeeded
├── Missing 404 ─── ModelNotFound, NotFound
├── Conflict 409 ─── NameTaken, LastOwner, InvoiceClosed, MonthNotOver, MonthOutOfOrder, TotalChanged, PriceBegun,
│                      NothingToBill, EarlierMonthOpen, DraftUncomputable, CurrenciesMixed, InvoiceInconsistent,
│                      IdempotencyConflict
├── RequestTooLarge 413
├── Refused 429 ─── RateLimitExceeded, RequestExceedsLimit, BudgetExceeded
└── ServerError 5xx ─── InternalError 500, EngineUnavailable, ModelLoading, Overloaded, Draining, RequestAborted,
                        DeadlineExceeded, SecretUnreadable 503
"""

from __future__ import annotations

from typing import ClassVar


class GatehouseError(Exception):
    """Base class of errors sent to clients as `{"error": {"message", "type", "param", "code"}}`.

    `should_retry` False: the response tells clients, which repeat some requests by themselves, not to repeat this one.
    """

    status: ClassVar[int] = 500
    type: str = "server_error"
    code: ClassVar[str] = "internal_error"
    should_retry: ClassVar[bool] = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(GatehouseError):
    """The request is invalid; retrying it unchanged cannot succeed."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidValue(BadRequest):
    """A field has an invalid value, or the body does not match the endpoint."""


class UnknownParameter(BadRequest):
    """The request has a field that the endpoint does not define."""

    code = "unknown_parameter"


class UnsupportedParameter(BadRequest):
    """The request uses a field of OpenAI's API that this version does not support."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    """The prompt and the requested output exceed the model's context length."""

    code = "context_length_exceeded"


class Unauthenticated(GatehouseError):
    """The request carries no valid credentials."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class InvalidApiKey(Unauthenticated):
    """The key is missing, malformed, unknown or revoked."""


class ExpiredApiKey(Unauthenticated):
    """The key has expired."""

    code = "expired_api_key"


class InvalidCredentials(Unauthenticated):
    """The e-mail address or password is wrong, or the member is disabled."""

    code = "invalid_credentials"


class Forbidden(GatehouseError):
    """The caller is authenticated but lacks permission."""

    status = 403
    type = "permission_error"
    code = "scope_not_allowed"


class ModelNotAllowed(Forbidden):
    """The tenant or key may not use this model."""

    code = "model_not_allowed"


class ModelNotPriced(Forbidden):
    """The model has no price in the tenant's currency, and the appliance is set to refuse unpriced requests."""

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
    """The member has a temporary password, set by someone else, and must change it first."""

    code = "password_change_needed"


class Missing(GatehouseError):
    """The object named in the path or body does not exist or is not visible to the caller."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(Missing):
    """No model with this name is served."""

    code = "model_not_found"


class NotFound(Missing):
    """The path, tenant, key, request or other object does not exist."""


class Conflict(GatehouseError):
    """The request conflicts with the current state on the server."""

    status = 409
    type = "conflict"
    code = "conflict"
    should_retry = False


class NameTaken(Conflict):
    """Another tenant or member already has this name or e-mail address."""

    code = "name_taken"


class InvoiceClosed(Conflict):
    """The invoice or month is closed and immutable; later corrections appear on the next invoice."""

    code = "invoice_closed"


class MonthNotOver(Conflict):
    """The month has not ended: it can be drafted but not closed."""

    code = "month_not_over"


class NothingToBill(Conflict):
    """The invoice would have no lines, and the request excluded empty invoices."""

    code = "nothing_to_bill"


class MonthOutOfOrder(Conflict):
    """Months must be closed in order: an earlier month with usage is open, or a later one is already closed."""

    code = "month_out_of_order"


class EarlierMonthOpen(Conflict):
    """An earlier month has usage on no invoice, and the request was for a draft that can be closed."""

    code = "earlier_month_open"


class TotalChanged(Conflict):
    """The invoice's total is not the one that the caller expects: it changed since the draft was read."""

    code = "total_changed"


class PriceBegun(Conflict):
    """The price has taken effect or will within a minute, so requests may have been charged at it."""

    code = "price_begun"


class DraftUncomputable(Conflict):
    """The draft of an invoice has no lines or total, for a reason in the tenant's usage events."""


class CurrenciesMixed(DraftUncomputable):
    """The month has costs in more than one currency, so they cannot be added up."""

    code = "currencies_mixed"


class InvoiceInconsistent(DraftUncomputable):
    """Usage events do not cost what their tokens cost at their prices. Caused by a bug or a damaged ledger, never by input."""

    code = "invoice_inconsistent"


class IdempotencyConflict(Conflict):
    """The `Idempotency-Key` was sent before, with another body."""

    code = "idempotency_conflict"


class LastOwner(Conflict):
    """The change would leave the appliance without an owner."""

    code = "last_owner"


class RequestTooLarge(GatehouseError):
    """The body is larger than the server accepts."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Refused(GatehouseError):
    """A limit refused the request; nothing was consumed."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class RateLimitExceeded(Refused):
    """A rate limit is exceeded; `retry_after_s` is exact. `limit_type` is `tokens` or `requests`."""

    def __init__(self, message: str, *, limit_type: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.type = limit_type


class RequestExceedsLimit(Refused):
    """The request alone exceeds the limit, so waiting cannot help."""

    code = "request_exceeds_limit"
    should_retry = False

    def __init__(self, message: str, *, limit_type: str) -> None:
        super().__init__(message)
        self.type = limit_type


class BudgetExceeded(Refused):
    """The rest of a monthly budget does not cover the request."""

    type = "insufficient_quota"
    code = "budget_exceeded"
    should_retry = False


class ServerError(GatehouseError):
    """The server failed or is unavailable."""

    status = 503
    code = "engine_unavailable"


class InternalError(ServerError):
    """A bug. The log has the traceback under the request id."""

    status = 500
    code = "internal_error"


class EngineUnavailable(ServerError):
    """The engine process is not running or exited during the request."""


class ModelLoading(ServerError):
    """The model is being loaded."""

    code = "model_loading"


class Overloaded(ServerError):
    """The waiting queue is full, or the database is temporarily unavailable."""

    code = "overloaded"


class Draining(ServerError):
    """The appliance is shutting down and accepts no new requests."""

    code = "draining"


class RequestAborted(ServerError):
    """An administrator aborted the request, so clients must not retry it automatically."""

    code = "request_aborted"
    should_retry = False


class SecretUnreadable(ServerError):
    """A stored secret was sealed with a different `secret.key`; only the operator can fix that."""

    code = "secret_unreadable"
    should_retry = False


class DeadlineExceeded(ServerError):
    """The request exceeded the maximum duration."""

    code = "deadline_exceeded"
    should_retry = False
