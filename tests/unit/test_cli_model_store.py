"""Models in the data folder: added by link or copy, found by name, removed without touching what is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.cli import model_store
from appliance.cli.failure import CommandFailed
from appliance.serving.model_builder import DEMO_MODEL


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "somewhere" / "tiny"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "part").write_text("12345")
    return folder


def test_a_link_is_found_by_its_name(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    assert model_store.locate("tiny", tmp_path).resolve() == model
    assert [path.name for path in model_store.added_models(tmp_path)] == ["tiny"]


def test_a_path_comes_before_a_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_store.link(tmp_path, model_store.new_model_path("tiny", tmp_path))
    monkeypatch.chdir(model.parent)
    assert model_store.locate("tiny", tmp_path) == model


def test_the_demo_is_found_by_the_name_that_the_list_shows(tmp_path: Path) -> None:
    assert model_store.locate("gatehouse-demo", tmp_path) == DEMO_MODEL


def test_an_added_model_comes_before_the_demo(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("gatehouse-demo", tmp_path))
    assert model_store.locate("gatehouse-demo", tmp_path).resolve() == model


def test_a_copy_is_whole_and_reports_its_progress(model: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    place = model_store.new_model_path("copy", tmp_path)
    model_store.copy(model, place, progress=fractions.append)
    assert (place / "sub" / "part").read_text() == "12345"
    assert fractions[-1] == 1.0


def test_an_interrupted_copy_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    place = model_store.new_model_path("copy", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        model_store.copy(model, place, progress=interrupt)
    assert not list(place.parent.iterdir())


def test_a_taken_name_is_refused(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    with pytest.raises(CommandFailed, match="already"):
        model_store.new_model_path("tiny", tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", ".hidden", "x" * 101, "a b"])
def test_what_cannot_be_a_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as refused:
        model_store.new_model_path(name, tmp_path)
    assert refused.value.status == 2


def test_removing_a_link_leaves_the_model(model: Path, tmp_path: Path) -> None:
    place = model_store.new_model_path("tiny", tmp_path)
    model_store.link(model, place)
    model_store.remove(place)
    assert (model / "config.json").exists()
    assert not place.is_symlink()


def message_of(model: str, tmp_path: Path) -> str:
    with pytest.raises(CommandFailed) as refused:
        model_store.locate_existing(model, tmp_path)
    return refused.value.message


def test_a_mistyped_name_is_told_the_closest_model_or_all_that_were_added(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_store.locate_existing("gatehouse-demo", tmp_path) == DEMO_MODEL
    neither = f"there is neither a folder {tmp_path}/{{0}} nor an added model named '{{0}}'"
    assert message_of("gatehouse-dmeo", tmp_path) == f"{neither.format('gatehouse-dmeo')}; did you mean 'gatehouse-demo'?"
    assert message_of("zzz", tmp_path) == f"{neither.format('zzz')}; no model has been added"
    for name in ("tiny", "large"):
        model_store.link(model, model_store.new_model_path(name, tmp_path))
    assert message_of("tinny", tmp_path).endswith("; did you mean 'tiny'?")
    assert message_of("zzz", tmp_path).endswith("; the added models are large, tiny")


def test_a_mistyped_folder_is_told_the_closest_one_beside_it(model: Path, tmp_path: Path) -> None:
    assert (
        message_of(f"{model}y", tmp_path)
        == f"there is no folder {model}y, and nothing is downloaded; did you mean {str(model)!r}?"
    )
    nowhere = f"{tmp_path}/nowhere/tiny"
    assert message_of(nowhere, tmp_path) == f"there is no folder {nowhere}, and nothing is downloaded"


def test_an_added_model_whose_folder_is_gone_says_so(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    model.rename(model.parent / "moved")
    assert message_of("tiny", tmp_path) == f"the added model 'tiny' is a link to {model}, which does not exist"
