"""Would this request pass? What a key's next request would meet, asked by a person: nothing is taken and nothing is started."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError
from appliance.metering.limits.admission import Admission, Forecast
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.queue import exact_wait_s
from appliance.metering.limits.refusals import not_priced, refusal
from appliance.metering.prices import PriceBook
from appliance.serving.model_registry import ModelRegistry, ServedModel, no_such_model
from appliance.serving.prompting import output_room
from appliance.serving.request_limits import RequestLimits
from appliance.tenancy.fields import DEFAULT_SCOPES, INFERENCE_SCOPE
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import ApiKey, Limits, Principal, Tenant
from appliance.tenancy.tiers import Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request that somebody thinks of, `batch` work or not. Without a `key` the limits of its tenant and model alone are
    asked."""

    tenant: Tenant
    key: ApiKey | None
    model: str
    prompt_tokens: int
    max_tokens: int | None = None
    answers: int = 1
    batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What would come of it. `error` is what its client would be told, at once when it would not wait. `wait_s` is after how
    long the limits have room, None when no waiting helps. `admission_wait_ms` is the patience of its tier. Of a model that is
    not here no limit is asked."""

    forecast: Forecast
    error: GatehouseError | None
    wait_s: float | None
    admission_wait_ms: int

    @property
    def would_wait(self) -> bool:
        """Return whether it would stand in the admission queue, and probably pass then."""
        return self.error is None and self.forecast.would_wait

    @property
    def allowed(self) -> bool:
        """Return whether it would begin at once."""
        return self.error is None and not self.forecast.refusals


class Forecasts:
    """Asks the same admission that serves."""

    def __init__(
        self,
        admission: Admission,
        *,
        prices: PriceBook,
        tiers: Tiers,
        policies: ModelPolicies,
        models: ModelRegistry,
        clock: Clock,
        limits: RequestLimits,
    ) -> None:
        self._admission = admission
        self._prices = prices
        self._tiers = tiers
        self._policies = policies
        self._models = models
        self._clock = clock
        self._limits = limits

    async def ask(self, question: Question) -> Verdict:
        """Return what would come of the request now."""
        tenant, model = question.tenant, question.model
        principal = Principal(tenant=tenant, key=question.key or _no_key(tenant))
        tier = await self._tiers.get(tenant.tier)
        error = self._barred(principal, question)
        if error is not None and self._served(model) is None:  # before anybody remembers a name that somebody made up
            nothing = Forecast(decisions=(), tokens=0, would_wait=False)
            return Verdict(forecast=nothing, error=error, wait_s=None, admission_wait_ms=tier.admission_wait_ms)
        request = AdmissionRequest(
            principal=principal,
            model=model,
            prompt_tokens=question.prompt_tokens,
            max_output_tokens=question.max_tokens,
            price=await self._prices.current(model, self._clock.now(), currency=tenant.currency),
            output_room=question.max_tokens or self._room(model, question.prompt_tokens),
            answers=question.answers,
            batch=question.batch,
            policy=await self._policies.find(model),
        )
        forecast = await self._admission.forecast(request, tier.admission_wait_ms / 1000)
        if error is None and request.price is None and self._limits.refuse_unpriced:
            error = not_priced(model, tenant.currency)
        wait_s = _wait_s(forecast) if error is None else None  # what stops it before its limits does not free with time
        if error is None and forecast.refusals and not forecast.would_wait:
            error = refusal(forecast.refusals)
        return Verdict(forecast=forecast, error=error, wait_s=wait_s, admission_wait_ms=tier.admission_wait_ms)

    def _room(self, model: str, prompt_tokens: int) -> int | None:
        """Return how long an answer may get for which nobody asked a length."""
        served = self._served(model)
        return None if served is None or served.max_model_len is None else max(served.max_model_len - prompt_tokens, 0)

    def _served(self, model: str) -> ServedModel | None:
        return next((each for each in self._models.list() if each.name == model), None)

    def _barred(self, principal: Principal, question: Question) -> GatehouseError | None:
        """Return why the request would not come as far as the limits, by the checks of those who would refuse it."""
        try:
            principal.check_usable(self._clock.now())
            principal.check_scope(INFERENCE_SCOPE)
            served = self._served(question.model)
            if served is None:
                return no_such_model(question.model)
            principal.check_model(question.model)
            if served.max_model_len is not None:
                output_room(
                    prompt_tokens=question.prompt_tokens, max_tokens=question.max_tokens, max_model_len=served.max_model_len
                )
        except GatehouseError as error:
            return error
        return None


def _wait_s(forecast: Forecast) -> float | None:
    if any(decision.wait_s is None for decision in forecast.refusals):
        return None
    known = exact_wait_s(forecast.refusals)
    return known or max((decision.wait_s or 0.0 for decision in forecast.refusals), default=0.0)


def _no_key(tenant: Tenant) -> ApiKey:
    """Return a key without limits of its own."""
    return ApiKey(
        id="",
        tenant_id=tenant.id,
        name="",
        prefix="",
        scopes=DEFAULT_SCOPES,
        limits=Limits(),
        allowed_models=None,
        allowed_networks=None,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
        created_at=tenant.created_at,
    )
