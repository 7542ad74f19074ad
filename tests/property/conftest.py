"""Settings of the Hypothesis tests: the same examples in every run, and no deadline per example."""

from __future__ import annotations

from hypothesis import settings

settings.load_profile("ci")
