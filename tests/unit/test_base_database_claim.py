"""One gateway per database: the second one is told so, and a claim dies with its holder."""

from __future__ import annotations

import pytest

from appliance.base.database_claim import claim_database
from appliance.base.settings import UnusableData


async def test_a_second_gateway_is_refused_until_the_first_has_gone(empty_database_url: str) -> None:
    first = await claim_database(empty_database_url)
    with pytest.raises(UnusableData, match="another Gatehouse uses"):
        await claim_database(empty_database_url, wait_s=0)
    await first.release()

    second = await claim_database(empty_database_url, wait_s=5)

    await second.release()
