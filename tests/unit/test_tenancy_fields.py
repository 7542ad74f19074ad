"""Names may use any script, but no characters that change how the surrounding text is displayed."""

from __future__ import annotations

import pytest

from appliance.base.errors import InvalidValue
from appliance.metering.economics import HostedPrice
from appliance.metering.invoicing.seller import Seller
from appliance.tenancy.fields import ADDRESS_CHARS_MAX, NAME_CHARS_MAX, check_billing, check_currency, check_name, check_names

BIDIRECTIONAL_CONTROLS = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]


@pytest.mark.parametrize(
    "name", ["Zoë & Søn", "עֲנָן בע״מ", "شركة\u200f النور", "👩\u200d🔬 lab", "=1+1", "<b>bob</b>", "x" * NAME_CHARS_MAX]
)
def test_names_in_any_script_are_accepted(name: str) -> None:
    assert check_name(f" {name} ") == name


@pytest.mark.parametrize("character", ["\n", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\ud800"])
def test_control_characters_are_refused_naming_the_field(character: str) -> None:
    with pytest.raises(InvalidValue, match="must not contain control characters") as refused:
        check_name(f"a{character}b", "billing.name")
    assert refused.value.param == "billing.name"


@pytest.mark.parametrize("character", BIDIRECTIONAL_CONTROLS, ids=ascii)
def test_bidirectional_control_characters_are_refused(character: str) -> None:
    with pytest.raises(InvalidValue, match="must not contain bidirectional control characters") as refused:
        check_name(f"bob{character}gro.elpmaxe")
    assert refused.value.param == "name"
    with pytest.raises(InvalidValue):
        check_names([f"demo{character}"], "allowed_models")
    with pytest.raises(InvalidValue):
        check_billing({"address": f"Lane 1\n{character}Town"})


@pytest.mark.parametrize("character", ["\u200b", "\u2060", "\ufeff", "\u00ad", "\u3164", "\U000e0041"], ids=ascii)
def test_invisible_characters_are_refused(character: str) -> None:
    with pytest.raises(InvalidValue, match="must not contain invisible characters"):
        check_name(f"a{character}lice")


@pytest.mark.parametrize(
    ("field", "wrong", "right"), [("country", "xx", "DE"), ("country", "de", "AT"), ("email", "no", "bills@example.com")]
)
def test_a_country_must_be_a_code_and_an_email_an_address(field: str, wrong: str, right: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_billing({field: wrong})
    assert refused.value.param == f"billing.{field}"
    assert check_billing({field: right}) == {field: right}


def test_stored_names_with_such_characters_can_still_be_read() -> None:
    name = "bob \u202e gro"
    assert Seller(name=name, address=(name,)).name == name
    assert HostedPrice(name=name, prompt=1, completion=1).name == name


@pytest.mark.parametrize("value", ["EURO", "EU", "eur", "E1R", "ÄUR", "", None])
def test_a_currency_has_three_capital_letters(value: object) -> None:
    with pytest.raises(InvalidValue, match="three capital letters, like EUR"):
        check_currency(value)
    assert check_currency("EUR") == "EUR"


def test_a_postal_address_has_a_limit_over_all_its_lines() -> None:
    line = "a" * 99 + "\n"
    longest = line * (ADDRESS_CHARS_MAX // 100)
    assert check_billing({"address": longest}) == {"address": longest.strip()}
    with pytest.raises(InvalidValue, match=f"at most {ADDRESS_CHARS_MAX} characters"):
        check_billing({"address": longest + "b"})
