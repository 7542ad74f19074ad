"""Counts the open requests of each model and tenant, and decides whether one more may be opened. Knows no request."""

from __future__ import annotations

from collections import Counter

from appliance.base.shared_places import has_place


class OpenRequests:
    """Every answer of a request takes one place of its model."""

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()  # by model
        self._answers_of: Counter[tuple[str, str]] = Counter()  # by model and tenant
        self._requests_of: Counter[tuple[str, str]] = Counter()

    def has_room(self, model: str, tenant_id: str, places: int) -> bool:
        """Return whether the tenant may open one more request of a model whose tenants share `places`."""
        return has_place(self._answers_of[model, tenant_id], self._answers[model], places)

    def requests_of(self, model: str, tenant_id: str) -> int:
        """Return how many requests of the tenant are open for the model."""
        return self._requests_of[model, tenant_id]

    def add(self, model: str, tenant_id: str, num_answers: int) -> None:
        """Count a new request with `num_answers` answers."""
        self._count(model, tenant_id, 1, num_answers)

    def remove(self, model: str, tenant_id: str, num_answers: int) -> None:
        """Undo `add` for a request that has ended."""
        self._count(model, tenant_id, -1, -num_answers)
        if not self._requests_of[model, tenant_id]:
            del self._requests_of[model, tenant_id], self._answers_of[model, tenant_id]

    def _count(self, model: str, tenant_id: str, requests: int, answers: int) -> None:
        self._answers[model] += answers
        self._answers_of[model, tenant_id] += answers
        self._requests_of[model, tenant_id] += requests
