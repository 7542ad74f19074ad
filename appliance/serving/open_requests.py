"""How many requests of each model and tenant are open, and whether there is a place for one more. Knows no request."""

from __future__ import annotations

from collections import Counter

from appliance.base.shared_places import has_place


class OpenRequests:
    """Every answer of a request takes a place of its model."""

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()  # by model
        self._answers_of: Counter[tuple[str, str]] = Counter()  # by model and tenant
        self._requests_of: Counter[tuple[str, str]] = Counter()

    def has_place(self, model: str, tenant_id: str, places: int) -> bool:
        """Return whether the tenant may open one more request of a model with so many `places`, which all tenants share."""
        return has_place(self._answers_of[model, tenant_id], self._answers[model], places)

    def requests_of(self, model: str, tenant_id: str) -> int:
        """Return how many requests of a tenant are open."""
        return self._requests_of[model, tenant_id]

    def began(self, model: str, tenant_id: str, num_answers: int) -> None:
        """Count a request that begins."""
        self._count(model, tenant_id, 1, num_answers)

    def ended(self, model: str, tenant_id: str, num_answers: int) -> None:
        """Count it no more."""
        self._count(model, tenant_id, -1, -num_answers)
        if not self._requests_of[model, tenant_id]:
            del self._requests_of[model, tenant_id], self._answers_of[model, tenant_id]

    def _count(self, model: str, tenant_id: str, requests: int, answers: int) -> None:
        self._answers[model] += answers
        self._answers_of[model, tenant_id] += answers
        self._requests_of[model, tenant_id] += requests
