"""A request as limits see it: who asks for how much of which model, and what that costs. Values only."""

from __future__ import annotations

from functools import cached_property

import msgspec

from appliance.metering.prices import Price, Rate
from appliance.tenancy.fields import check_choice
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Principal

SERVICE_TIERS = ("auto", "default", "flex")
"""What a request may ask for. `flex` is batch work: cheaper, and served when nothing more urgent waits."""


def is_batch_work(service_tier: object) -> bool:
    """Return whether a service tier, one of SERVICE_TIERS, is that of batch work. Raises InvalidValue."""
    return check_choice(service_tier, "service_tier", SERVICE_TIERS) == "flex"


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for `cached_property`
    """A request as admission sees it, and what it costs.

    `max_output_tokens` is what was asked for; `output_room` is how long the answer may get, which differs when nothing was
    asked for: then it is the rest of the model's context. Both are of one answer, of which there are `answers`. `batch` work
    pays the batch share of the price.
    """

    principal: Principal
    model: str
    prompt_tokens: int
    max_output_tokens: int | None
    price: Price | None
    output_room: int | None = None
    answers: int = 1
    batch: bool = False
    policy: ModelPolicy | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or (self.max_output_tokens or 0) < 0 or self.answers < 1:
            raise ValueError("token counts must not be negative, and there is at least one answer")

    @property
    def tenant_id(self) -> str:
        """Return whose request it is."""
        return self.principal.tenant.id

    @property
    def key_id(self) -> str:
        """Return by which key it was sent."""
        return self.principal.key.id

    @property
    def currency(self) -> str | None:
        """Return what its cost is in."""
        return None if self.price is None else self.price.currency

    @cached_property
    def rate(self) -> Rate | None:
        """Return what its tenant pays for its tokens."""
        return None if self.price is None else self.price.rate(self.principal.tenant.tier, batch=self.batch)

    def cost(self, cached_tokens: int, completion_tokens: int, *, rejected_tokens: int = 0, prompt: int | None = None) -> int:
        """Return the cost in pico-units; without a price there is none. `prompt` None is the whole prompt."""
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
        """Return the cost in pico-units, however much of the prompt is in the cache, and without guesses of speculation."""
        return max(self.cost(0, completion_tokens), self.cost(self.prompt_tokens, completion_tokens))
