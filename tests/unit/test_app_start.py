"""A start that fails half-way leaves nothing running and nothing open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance import app
from appliance.app import Appliance
from appliance.base.database_claim import claim_database
from appliance.base.settings import load_settings
from appliance.telemetry.gpu import GpuProbe, GpuReading


async def test_a_start_that_fails_after_the_sampler_ends_it_and_closes_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Probe(GpuProbe):
        def read(self) -> list[GpuReading]:
            done.append("read")
            return []

        def close(self) -> None:
            done.append("close")

    async def fail(*_parts: Any) -> None:
        assert "system sampler" in running()
        raise ValueError("the first login cannot be made")

    def running() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks()}

    monkeypatch.setattr(app, "GpuProbe", Probe)
    monkeypatch.setattr(app, "bootstrap", fail)
    settings = load_settings(options={"data_dir": tmp_path}, environ={})

    with pytest.raises(ValueError, match="first login"):
        await Appliance(settings).start()

    assert "system sampler" not in running()
    assert (done[0], done[-1]) == ("read", "close")
    await (await claim_database(settings.database_url)).release()
