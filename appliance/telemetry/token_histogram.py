"""The histogram of what is observed for every token of every stream."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


@dataclass(slots=True)
class _Values:
    """The values of one model: how many are in each bucket, and their sum."""

    counts: list[int]
    created_s: float
    sum_s: float = 0.0


class TokenHistogram(Collector):
    """Seconds by model, exported like prometheus_client's Histogram, which takes two locks for each value. One thread observes;
    any may collect."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        """bounds_s: the upper bounds of all buckets but the last, in ascending order."""
        self._name = name
        self._text = text
        self._bounds_s = bounds_s
        self._by_model: dict[str, _Values] = {}

    def observe(self, model: str, values_s: Sequence[float]) -> None:
        """Observe values. Without any, the model's series begin at zero."""
        values = self._by_model.get(model)
        if values is None:
            values = self._by_model[model] = _Values([0] * (len(self._bounds_s) + 1), time.time())
        for value_s in values_s:
            values.counts[bisect_left(self._bounds_s, value_s)] += 1
            values.sum_s += value_s

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        bounds = [floatToGoString(bound) for bound in (*self._bounds_s, math.inf)]
        for model, values in list(self._by_model.items()):
            family.add_metric([model], list(zip(bounds, accumulate(values.counts), strict=True)), values.sum_s)
            family.add_sample(f"{self._name}_created", {"model": model}, values.created_s)
        yield family
