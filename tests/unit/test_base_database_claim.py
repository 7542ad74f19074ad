"""One gateway per database: the second one is told so, and a claim dies with its holder."""

from __future__ import annotations

from pathlib import Path

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


async def test_a_link_to_a_database_is_the_same_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    first = await claim_database(f"sqlite:///{tmp_path}/real.db")
    with pytest.raises(UnusableData, match="another Gatehouse uses"):
        await claim_database(f"sqlite:///{tmp_path}/link.db")
    await first.release()


async def test_a_server_that_does_not_answer_is_told_in_one_line() -> None:
    with pytest.raises(UnusableData, match=r"^the database cannot be used: .*check --database") as refused:
        await claim_database("postgresql://nobody@127.0.0.1:1/nothing")

    assert "\n" not in str(refused.value)
