"""The data folder at the start: creation errors are reported, and a refused start leaves nothing behind."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from appliance.base.data_folder import StartupFiles, make_data_folder
from appliance.base.settings import UnusableData


def test_the_folder_is_made_with_its_parents_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    assert make_data_folder(folder) is True
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_data_folder(folder) is False


@pytest.mark.parametrize("place", ["/proc/nothing", "file/below"])
def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableData, match=r"cannot create the data folder .* \(.*\): choose .* --data-dir"):
        make_data_folder(tmp_path / place)


def refused(startup_files: StartupFiles, *names: str, keep: bool = False) -> None:
    def start() -> None:
        with startup_files.removed_on_failure():
            for name in names:
                (startup_files.folder / name).touch()
            startup_files.keep = keep
            raise UnusableData("the database does not answer")

    with pytest.raises(UnusableData):
        start()


def test_a_refused_start_leaves_no_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    names = ("gatehouse.lock", "gatehouse.db", "gatehouse.db-wal", "gatehouse.db.claim", "secret.key")
    refused(StartupFiles.begin(folder), *names)
    assert not folder.exists()


def test_what_was_there_before_a_refused_start_stays(tmp_path: Path) -> None:
    for name in ("gatehouse.db", "secret.key", "gatehouse.toml"):
        (tmp_path / name).write_text("old")
    refused(StartupFiles.begin(tmp_path), "gatehouse.lock", "gatehouse.db-wal", "gatehouse.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gatehouse.db", "gatehouse.toml", "secret.key"]


@pytest.mark.parametrize("name", ["first-login-pending", "gatehouse.toml"])
def test_everything_stays_with_a_login_to_be_shown_or_what_another_has_put_there(tmp_path: Path, name: str) -> None:
    refused(StartupFiles.begin(tmp_path / "data"), "gatehouse.db", "secret.key", name)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"gatehouse.db", "secret.key", name}


def test_a_start_that_has_succeeded_keeps_everything(tmp_path: Path) -> None:
    refused(StartupFiles.begin(tmp_path / "data"), "gatehouse.lock", "gatehouse.db", keep=True)
    assert (tmp_path / "data" / "gatehouse.db").exists()
