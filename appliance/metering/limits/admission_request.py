"""A request as admission sees it: tenant and key, model, token counts and cost. Values only."""

from __future__ import annotations

from functools import cached_property

import msgspec

from appliance.metering.prices import Price, Rate
from appliance.tenancy.fields import check_choice
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Principal

SERVICE_TIERS = ("auto", "default", "flex")
"""Values of the request field `service_tier`. `flex` is batch work: cheaper, and served when nothing more urgent waits."""


def is_batch_work(service_tier: object) -> bool:
    """Return whether `service_tier`, one of SERVICE_TIERS, requests batch work. Raises InvalidValue."""
    return check_choice(service_tier, "service_tier", SERVICE_TIERS) == "flex"


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for `cached_property`
    """A request as admission sees it, and what it costs.

    `max_output_tokens` is the requested maximum, None if there is none; `output_room` is the longest possible answer: without a
    requested maximum the operator's default or the rest of the model's context. Both are per answer; there are `num_answers`.
    `batch` work pays the batch share of the price.
    """

    principal: Principal
    model: str
    prompt_tokens: int
    max_output_tokens: int | None
    price: Price | None
    output_room: int | None = None
    num_answers: int = 1
    batch: bool = False
    policy: ModelPolicy | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or (self.max_output_tokens or 0) < 0 or self.num_answers < 1:
            raise ValueError("token counts must not be negative, and there is at least one answer")

    @property
    def tenant_id(self) -> str:
        """Return the id of the request's tenant."""
        return self.principal.tenant.id

    @property
    def key_id(self) -> str:
        """Return the id of the key that sent it."""
        return self.principal.key.id

    @property
    def currency(self) -> str | None:
        """Return the currency of its cost, None without a price."""
        return None if self.price is None else self.price.currency

    @cached_property
    def rate(self) -> Rate | None:
        """Return the unit prices that its tenant pays, None without a price."""
        return None if self.price is None else self.price.rate(self.principal.tenant.tier, batch=self.batch)

    def cost(self, cached_tokens: int, completion_tokens: int, *, rejected_tokens: int = 0, prompt: int | None = None) -> int:
        """Return the cost in pico-units, 0 without a price. `prompt` None is the whole prompt."""
        if self.rate is None:
            return 0
        prompt_tokens = self.prompt_tokens if prompt is None else prompt
        return self.rate.cost_picos(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(cached_tokens, prompt_tokens),
            completion_tokens=completion_tokens,
            rejected_tokens=rejected_tokens,
        )

    def cost_at_most(self, completion_tokens: int) -> int:
        """Return the highest cost in pico-units for any share of cached prompt, without rejected speculative tokens."""
        return max(self.cost(0, completion_tokens), self.cost(self.prompt_tokens, completion_tokens))
