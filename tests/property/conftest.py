"""Settings of the tests that Hypothesis writes: the same examples in every run, and no verdict on how long one took."""

from __future__ import annotations

from hypothesis import settings

settings.load_profile("ci")
