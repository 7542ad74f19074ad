"""A copy is current until a change concerns one of its names, or everything."""

from __future__ import annotations

from appliance.base.change_count import NAMES_MAX, ChangeCount


def test_a_copy_is_current_until_one_of_its_names_changes() -> None:
    changes = ChangeCount()
    read_at = changes.value
    changes.bump("another")
    assert changes.is_current(read_at, "tenant", "key")
    changes.bump("key")
    assert not changes.is_current(read_at, "tenant", "key")
    assert changes.is_current(read_at, "tenant")
    assert changes.is_current(changes.value, "tenant", "key")


def test_a_change_of_everything_concerns_every_name() -> None:
    changes = ChangeCount()
    changes.bump("tenant")
    read_at = changes.value
    changes.bump()
    assert not changes.is_current(read_at, "tenant")
    assert not changes.is_current(read_at, "one that never changed")
    assert changes.is_current(changes.value, "tenant")


def test_a_copy_of_unknown_age_is_not_current() -> None:
    assert not ChangeCount().is_current(None, "tenant")


def test_changes_of_any_number_of_names_take_a_bounded_amount_of_memory() -> None:
    changes = ChangeCount()
    for number in range(NAMES_MAX):
        changes.bump(f"key {number}")
    read_at = changes.value
    changes.bump("one more")
    assert not changes._of
    assert not changes.is_current(read_at, "one more")
