"""The histogram of token intervals against prometheus_client's."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from appliance.telemetry.token_histogram import TokenHistogram

BOUNDS_S = (0.001, 0.01, 0.1)


@pytest.mark.parametrize(
    "values_s",
    [[], [0.0005], [0.001, 0.0010001, 0.01], [0.05, 7.0, 0.1, 0.05], [0.2] * 3],
    ids=["nothing yet", "one", "on a bound", "in every bucket", "beyond the last bound"],
)
def test_the_exported_text_is_that_of_a_plain_histogram(values_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    plain, fast = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("waits", "Waits", ["model"], buckets=BOUNDS_S, registry=plain)
    histogram = TokenHistogram("waits", "Waits", BOUNDS_S)
    fast.register(histogram)
    for model in ("tiny", "large"):
        child = expected.labels(model)
        for value_s in values_s:
            child.observe(value_s)
        histogram.observe(model, values_s[:1])
        histogram.observe(model, values_s[1:])

    assert generate_latest(fast) == generate_latest(plain)
