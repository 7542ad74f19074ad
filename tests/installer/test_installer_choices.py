"""The installer's reading of options, environment and settings file agrees with that of the appliance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from steps import choices, paths, preflight, up
from steps.errors import InstallerError

from appliance.base import settings


def test_installer_and_appliance_have_the_same_default_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert paths.default_data_dir() == settings.default_data_dir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert paths.default_data_dir() == settings.default_data_dir()


@pytest.mark.parametrize("source", ["option", "environment", "file", "default"])
def test_settings_have_the_precedence_of_the_appliance(source: str, tmp_path: Path) -> None:
    options: dict[str, object] = {"data_dir": str(tmp_path)}
    environ: dict[str, str] = {}
    if source in ("option", "environment", "file"):
        (tmp_path / "gatehouse.toml").write_text('port = 7001\nhost = "127.0.0.3"\nmodels = ["/m/file"]\ndevice = "cpu"\n')
    if source in ("option", "environment"):
        environ = {"GATEHOUSE_PORT": "7002", "GATEHOUSE_HOST": "127.0.0.2", "GATEHOUSE_MODELS": "/m/one,/m/two"}
    if source == "option":
        options |= {"port": "7003"}
    ours = choices.choose({**options, "model": ["/m/option"] if source == "option" else None}, environ)
    theirs = settings.load_settings(
        options={**options, "models": ["/m/option"] if source == "option" else None}, environ=environ
    )
    assert (ours.host, ours.port, ours.data_dir, ours.device) == (theirs.host, theirs.port, theirs.data_dir, theirs.device)
    assert ours.models == tuple(model.model for model in theirs.models)


@pytest.mark.parametrize(
    ("file", "environ"),
    [
        ('[[models]]\nmodel = "/m/one"\n[[models]]\nmodel = "/m/two"\nquantization = "int8"', {}),
        ("", {"GATEHOUSE_MODELS": '["/m/one", {"model": "/m/two", "quantization": "int8"}]'}),
    ],
)
def test_models_with_their_own_settings_are_found(file: str, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gatehouse.toml").write_text(file)
    assert choices.choose({"data_dir": str(tmp_path)}, environ).models == ("/m/one", "/m/two")


@pytest.mark.parametrize("models", ["5", "[5, {}]", "[{model = 5}]"])
def test_an_invalid_list_of_models_is_left_to_the_appliance(models: str, tmp_path: Path) -> None:
    (tmp_path / "gatehouse.toml").write_text(f"models = {models}")
    assert choices.choose({"data_dir": str(tmp_path)}, {}).models == ()
    assert choices.choose({"data_dir": str(tmp_path)}, {"GATEHOUSE_MODELS": "["}).models == ()


@pytest.mark.parametrize(
    ("device", "own", "of_all"),
    [
        ("cpu", [None, "cuda"], "cuda"),
        ("cuda", ["cpu", "cpu"], "cpu"),
        ("cpu", ["auto", None], "auto"),
        ("auto", ["cpu", None], "auto"),
        ("cuda", [None, "cpu"], "cuda"),
        ("cpu", [], "cpu"),
    ],
)
def test_the_device_of_the_installation_is_the_most_capable_of_all_models(
    device: str, own: list[str | None], of_all: str, tmp_path: Path
) -> None:
    models = [{"model": f"/m/{name}", **({} if each is None else {"device": each})} for name, each in enumerate(own)]
    environ = {"GATEHOUSE_MODELS": json.dumps(models), "GATEHOUSE_DEVICE": device}
    assert choices.choose({"data_dir": str(tmp_path)}, environ).device == of_all


def test_only_given_options_are_passed_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    given: dict[str, object] = {
        "command": "up",
        "host": None,
        "port": "9000",
        "data_dir": "data",
        "model": ["model", "added"],
        "database": None,
    }
    command = up.serve_command(given)
    assert command == ["serve", "--port", "9000", "--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "model"),
                       "--model", "added"]  # fmt: skip


def test_a_data_folder_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InstallerError, match="is not writable by this user"):
        preflight.check_data_dir(tmp_path / "data")
