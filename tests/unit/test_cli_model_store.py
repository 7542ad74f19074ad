"""Models in the data folder: adding by link or copy, finding by name, and removing without touching the original."""

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


def test_a_linked_model_is_found_by_name(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    assert model_store.locate("tiny", tmp_path).resolve() == model
    assert [path.name for path in model_store.added_models(tmp_path)] == ["tiny"]


def test_an_existing_path_takes_precedence_over_an_added_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_store.link(tmp_path, model_store.new_model_path("tiny", tmp_path))
    monkeypatch.chdir(model.parent)
    assert model_store.locate("tiny", tmp_path) == model


def test_the_demo_model_is_found_by_its_listed_name(tmp_path: Path) -> None:
    assert model_store.locate("gatehouse-demo", tmp_path) == DEMO_MODEL


def test_an_added_model_takes_precedence_over_the_demo_model(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("gatehouse-demo", tmp_path))
    assert model_store.locate("gatehouse-demo", tmp_path).resolve() == model


def test_copying_copies_all_files_and_reports_progress(model: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    destination = model_store.new_model_path("copy", tmp_path)
    model_store.copy(model, destination, progress=fractions.append)
    assert (destination / "sub" / "part").read_text() == "12345"
    assert fractions[-1] == 1.0


def test_an_interrupted_copy_leaves_no_files(model: Path, tmp_path: Path) -> None:
    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    destination = model_store.new_model_path("copy", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        model_store.copy(model, destination, progress=interrupt)
    assert not list(destination.parent.iterdir())


def test_a_taken_name_is_refused(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    with pytest.raises(CommandFailed, match="already"):
        model_store.new_model_path("tiny", tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", ".hidden", "x" * 101, "a b"])
def test_an_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as refused:
        model_store.new_model_path(name, tmp_path)
    assert refused.value.status == 2


def test_removing_a_link_keeps_the_original_model(model: Path, tmp_path: Path) -> None:
    destination = model_store.new_model_path("tiny", tmp_path)
    model_store.link(model, destination)
    model_store.remove(destination)
    assert (model / "config.json").exists()
    assert not destination.is_symlink()


def error_message(model: str, tmp_path: Path) -> str:
    with pytest.raises(CommandFailed) as refused:
        model_store.locate_existing(model, tmp_path)
    return refused.value.message


def test_a_mistyped_name_gets_the_closest_or_all_added_models_as_suggestion(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_store.locate_existing("gatehouse-demo", tmp_path) == DEMO_MODEL
    neither = f"there is neither a folder {tmp_path}/{{0}} nor an added model named '{{0}}'"
    assert error_message("gatehouse-dmeo", tmp_path) == f"{neither.format('gatehouse-dmeo')}; did you mean 'gatehouse-demo'?"
    assert error_message("zzz", tmp_path) == f"{neither.format('zzz')}; no model has been added"
    for name in ("tiny", "large"):
        model_store.link(model, model_store.new_model_path(name, tmp_path))
    assert error_message("tinny", tmp_path).endswith("; did you mean 'tiny'?")
    assert error_message("zzz", tmp_path).endswith("; the added models are large, tiny")


def test_a_mistyped_folder_gets_the_closest_sibling_as_suggestion(model: Path, tmp_path: Path) -> None:
    assert (
        error_message(f"{model}y", tmp_path)
        == f"there is no folder {model}y, and nothing is downloaded; did you mean {str(model)!r}?"
    )
    nowhere = f"{tmp_path}/nowhere/tiny"
    assert error_message(nowhere, tmp_path) == f"there is no folder {nowhere}, and nothing is downloaded"


def test_an_added_model_whose_folder_is_gone_is_reported(model: Path, tmp_path: Path) -> None:
    model_store.link(model, model_store.new_model_path("tiny", tmp_path))
    model.rename(model.parent / "moved")
    assert error_message("tiny", tmp_path) == f"the added model 'tiny' is a link to {model}, which does not exist"
