"""The fakes of `bench.admission` have the interface that serving uses."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import cast

import pytest

from appliance.metering.ledger.writer import Ledger
from appliance.serving.access_watch import AccessWatch
from bench import admission
from bench.admission_gateway import NoLedger, NoReservation, NoWatch
from bench.host_speed import HostSpeed
from tests.support.factories import admission_request, principal

SERVING = Path(__file__).parents[2] / "appliance" / "serving"


def test_the_fake_reservation_has_every_attribute_that_serving_uses() -> None:
    sources = [path.read_text("utf-8") for path in SERVING.rglob("*.py")]
    used = {name for source in sources for name in re.findall(r"reservation\.([a-z]\w*)", source)}

    assert {"settle", "mark_recorded"} <= used
    assert used - {name for name in dir(NoReservation(admission_request(principal(), 1))) if not name.startswith("_")} == set()


@pytest.mark.parametrize(
    ("real", "fake", "names"),
    [(Ledger, NoLedger, ("open", "settle", "checkpoint")), (AccessWatch, NoWatch, ("refresh",))],
)
def test_the_fakes_have_the_signatures_of_the_real_ones(real: type, fake: type, names: tuple[str, ...]) -> None:
    for name in names:
        methods = getattr(real, name), getattr(fake, name)
        assert len({len(inspect.signature(method).parameters) for method in methods}) == 1, name


async def test_a_measurement_on_a_busy_host_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class BusyHost:
        def measure(self) -> float:
            return 1.0

        def undisturbed(self, _parts: object) -> list[None]:
            return []

    async def measure() -> None:
        pass

    monkeypatch.setattr(admission, "SETTLE_S", 0.0)
    with pytest.raises(SystemExit, match=r"all \d+ pairs were disturbed by other programs"):
        await admission.until_undisturbed(cast("HostSpeed", BusyHost()), 2, measure)
