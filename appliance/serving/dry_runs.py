"""Dry-run admission checks: would a key's next request be admitted? Reserves nothing and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError
from appliance.metering.limits.admission import Admission, LimitsDryRun
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.queue import exact_wait_s
from appliance.metering.limits.refusals import not_priced, refusal
from appliance.metering.prices import PriceBook
from appliance.serving.model_registry import ModelRegistry, ServedModel, model_not_found
from appliance.serving.request_limits import RequestLimits
from appliance.serving.tokenizer import output_room
from appliance.tenancy.fields import DEFAULT_SCOPES
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import ApiKey, Limits, Principal, Tenant
from appliance.tenancy.tiers import Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest:
    """A hypothetical request. Without a `key`, only the limits of its tenant and model are checked."""

    tenant: Tenant
    key: ApiKey | None
    model: str
    prompt_tokens: int
    max_tokens: int | None = None
    num_answers: int = 1
    batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """Outcome of a dry run. `error` is the error the client would receive. `wait_s` is the time until the limits have room,
    None if waiting cannot help. `admission_wait_ms` is how long the tenant's tier may wait. For an unknown model no limits are
    checked."""

    limits: LimitsDryRun
    error: GatehouseError | None
    wait_s: float | None
    admission_wait_ms: int

    @property
    def would_wait(self) -> bool:
        """Return whether the request would wait in the admission queue and then probably be admitted."""
        return self.error is None and self.limits.would_wait

    @property
    def allowed(self) -> bool:
        """Return whether the request would start at once."""
        return self.error is None and not self.limits.refusals


class DryRuns:
    """Runs hypothetical requests through the admission that real requests use."""

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

    async def run(self, hypothetical: DryRunRequest) -> DryRunResult:
        """Return what would happen to the request now."""
        tenant, model = hypothetical.tenant, hypothetical.model
        principal = Principal(tenant=tenant, key=hypothetical.key or _limitless_key(tenant))
        tier = await self._tiers.get(tenant.tier)
        served = self._find_model(model)
        error = self._precheck_error(principal, hypothetical, served)
        if served is None:  # so that made-up model names never reach caches or counters
            empty = LimitsDryRun(decisions=(), tokens=0, patience_s=0.0)
            return DryRunResult(limits=empty, error=error, wait_s=None, admission_wait_ms=tier.admission_wait_ms)
        request = AdmissionRequest(
            principal=principal,
            model=model,
            prompt_tokens=hypothetical.prompt_tokens,
            max_output_tokens=hypothetical.max_tokens,
            price=await self._prices.current(model, self._clock.now(), currency=tenant.currency),
            output_room=_longest_output(hypothetical, served),
            num_answers=hypothetical.num_answers,
            batch=hypothetical.batch,
            policy=await self._policies.find(model),
        )
        dry_run = await self._admission.dry_run(request, tier.admission_wait_ms / 1000)
        if error is None and request.price is None and self._limits.refuse_unpriced:
            error = not_priced(model, tenant.currency)
        wait_s = _wait_s(dry_run) if error is None else None  # waiting does not cure an error of the prechecks
        if error is None and dry_run.refusals and not dry_run.would_wait:
            error = refusal(dry_run.refusals, request, dry_run.tokens)
        return DryRunResult(limits=dry_run, error=error, wait_s=wait_s, admission_wait_ms=tier.admission_wait_ms)

    def _find_model(self, name: str) -> ServedModel | None:
        return next((model for model in self._models.list() if model.name == name), None)

    def _precheck_error(
        self, principal: Principal, hypothetical: DryRunRequest, served: ServedModel | None
    ) -> GatehouseError | None:
        """Return the error of the checks that precede the limits, or None."""
        try:
            principal.check_inference(self._clock.now(), None if served is None else served.name)
            if served is None:
                return model_not_found(hypothetical.model)
            if served.max_model_len is not None:
                output_room(
                    prompt_tokens=hypothetical.prompt_tokens,
                    max_tokens=hypothetical.max_tokens,
                    default_max_tokens=served.default_max_tokens,
                    max_model_len=served.max_model_len,
                )
        except GatehouseError as error:
            return error
        return None


def _longest_output(hypothetical: DryRunRequest, served: ServedModel) -> int | None:
    """Return the tokens of the longest output of each answer, also of a request that does not fit the context; None while
    neither a maximum nor the context is known."""
    if hypothetical.max_tokens is not None:
        return hypothetical.max_tokens
    context_len = served.max_model_len
    rest = None if context_len is None else max(context_len - hypothetical.prompt_tokens, 0)
    return min((most for most in (rest, served.default_max_tokens) if most is not None), default=None)


def _wait_s(dry_run: LimitsDryRun) -> float | None:
    if any(decision.wait_s is None for decision in dry_run.refusals):
        return None
    known = exact_wait_s(dry_run.refusals)
    return known or max((decision.wait_s or 0.0 for decision in dry_run.refusals), default=0.0)


def _limitless_key(tenant: Tenant) -> ApiKey:
    """Return a stand-in for requests without a key: it has no limits of its own."""
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
