"""`gatehouse doctor` reports model settings that an engine would refuse, with the engine's own message."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from appliance.base import db
from appliance.base.db import Database
from appliance.cli import doctor as doctor_command
from appliance.cli import model_check
from appliance.cli.main import main
from appliance.serving.model_builder import DEMO_MODEL
from engine import visible_gpu
from engine.visible_gpu import NO_ANSWER, NO_GPU, VisibleGpu
from tests.support.published_configs import LLAMA_8B
from tests.support.typed_commands import CommandResult

GIB = 1 << 30
CHECK_MODEL = model_check.check_model
LLAMA_SMALL = {**LLAMA_8B, "num_hidden_layers": 2, "vocab_size": 4096}


pytestmark = pytest.mark.usefixtures("skip_tensor_check")


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs doctor with a settings file and returns its rows by check."""

    def run(settings: str) -> dict[str, dict[str, str]]:
        (tmp_path / "gatehouse.toml").write_text(settings)
        capsys.readouterr()
        status = main(["doctor", "--data-dir", str(tmp_path), "--port", "0", "--json"])
        answer = CommandResult(status, *capsys.readouterr()).json()
        assert status == (0 if answer["ok"] else 1)
        return {row["check"]: row for row in answer["data"]}

    return run


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let engines see a GPU of this memory and compute capability."""

    def use(memory_gib: float, capability: tuple[int, int] = (9, 0)) -> None:
        gpu = VisibleGpu("Card", int(memory_gib * GIB), capability)
        monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (gpu, ""))

    return use


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("max_model_len = 2048", "max_model_len (2048) is longer than the model's context (1024)"),
        ("quantization = 'awq'", "quantization = 'awq' cannot be applied to an unquantised checkpoint"),
        ("kv_cache_bytes = '1 MiB'\nblock_size = 1024", "kv_cache_bytes (1048576 bytes) is less than one KV block"),
        ("kv_cache_bytes = '1 MiB'\nmax_model_len = 1024", "max_model_len (1024) does not fit into the KV cache"),
        ("max_num_seqs = 8\nmax_num_batched_tokens = 4", "max_num_batched_tokens must be at least max_num_seqs (8)"),
        ("swap_space_gib = 4096", "swap_space (4096 GiB) is more than 80% of main memory"),
        (
            f"enable_prefix_caching = false\nshared_prefixes = ['{__file__}']",
            "shared_prefixes need prefix caching, which is off",
        ),
    ],
)
def test_a_setting_that_an_engine_refuses_is_reported_for_its_model(settings: str, problem: str, doctor: Any) -> None:
    row = doctor(f"[[models]]\nmodel = 'gatehouse-demo'\n{settings}")["model gatehouse-demo"]
    assert row["state"] == "wrong"
    assert row["found"].startswith(problem)
    assert row["advice"].startswith("correct the setting ")
    row = doctor(settings)["model gatehouse-demo"]
    assert row["found"].startswith(problem), "the demo model has the settings of all models"


def test_each_model_is_checked_with_its_own_settings(doctor: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "other")
    found = doctor("[[models]]\nmodel = 'gatehouse-demo'\n[[models]]\nmodel = 'other'\nmax_model_len = 1025")
    assert found["model gatehouse-demo"]["state"] == "ok"
    assert found["model other"]["found"].startswith("max_model_len (1025) is longer")


def test_models_that_do_not_fit_the_gpu_are_reported_with_remedies(
    doctor: Any, tmp_path: Path, use_gpu: Callable[..., None]
) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "other")
    two = "[[models]]\nmodel = 'gatehouse-demo'\n[[models]]\nmodel = 'other'"
    for memory_gib, state in (8, "ok"), (1.2, "wrong"):
        use_gpu(memory_gib)
        found = doctor(two)
        assert [found[f"model {name}"]["state"] for name in ("gatehouse-demo", "other")] == [state] * 2
    assert "does not fit: needs" in found["model other"]["found"]
    assert found["model other"]["advice"].startswith("make a change that is listed")
    assert doctor("device = 'cpu'\n" + two)["model other"]["state"] == "ok"


def test_a_data_type_that_the_gpu_does_not_support_is_reported(doctor: Any, use_gpu: Callable[..., None]) -> None:
    for capability, state in ((8, 0), "wrong"), ((8, 9), "ok"):
        use_gpu(80, capability)
        assert doctor("kv_cache_dtype = 'fp8'")["model gatehouse-demo"]["state"] == state


def test_models_are_judged_by_the_gpu_that_engines_would_use(doctor: Any, use_gpu: Callable[..., None]) -> None:
    use_gpu(80, (8, 0))
    row = doctor("")["gpu"]
    assert (row["state"], row["found"]) == ("ok", f"Card ({80 * 1024} MiB)")


def test_gpus_hidden_from_engines_are_not_judged(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = "CUDA_VISIBLE_DEVICES='' leaves no GPU"
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (None, hidden))
    row = doctor("")["gpu"]
    assert (row["state"], row["found"]) == ("note", f"{hidden}: models run on the CPU")
    row = doctor("device = 'cuda'")["gpu"]
    assert (row["state"], row["found"]) == ("wrong", hidden)
    assert row["advice"] == "correct or unset CUDA_VISIBLE_DEVICES, or omit --device"


def test_a_missing_driver_is_to_be_installed_whatever_the_variable_says(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (None, NO_GPU))
    row = doctor("device = 'cuda'")["gpu"]
    assert (row["found"], row["advice"]) == ("no NVIDIA GPU", "install the NVIDIA driver, or omit --device")


def test_a_machine_without_a_gpu_is_no_fault(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (None, NO_GPU))
    row = doctor("")["gpu"]
    assert (row["state"], row["found"]) == ("ok", "no NVIDIA GPU: models run on the CPU")


@pytest.mark.parametrize(("device", "state"), [("auto", "wrong"), ("cuda", "wrong"), ("cpu", "note")])
def test_a_driver_that_hangs_is_a_fault_unless_all_models_run_on_the_cpu(
    device: str, state: str, doctor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (None, f"{NO_ANSWER} within 30 s"))
    row = doctor(f"device = '{device}'")["gpu"]
    assert (row["state"], row["found"].partition(":")[0]) == (state, "the NVIDIA driver does not answer within 30 s")
    assert ("restart this machine" in row["advice"]) == (state == "wrong")


def test_an_engine_of_the_running_appliance_that_does_not_use_the_gpu_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"parts": {"gateway": "ok"}, "notes": {"engine demo": "serves on the CPU"}}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, json=body))
    assert [(check.state, check.found) for check in doctor_command._readiness("http://appliance")] == [
        ("ok", "all parts are ready"),
        ("note", "engine demo serves on the CPU"),
    ]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (sqlite3.SQLITE_FULL, "free some disk space"),
        (sqlite3.SQLITE_IOERR_WRITE, "check the owner and the permissions of "),
        (sqlite3.SQLITE_CANTOPEN, "check the owner and the permissions of "),
        (sqlite3.SQLITE_CORRUPT_INDEX, "restore a backup"),
        (sqlite3.SQLITE_NOTADB, "restore a backup"),
    ],
)
def test_a_restore_is_advised_only_for_a_damaged_database(
    code: int, advice: str, doctor: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_database: object) -> None:
        error = sqlite3.OperationalError("fault")
        error.sqlite_errorcode = code
        raise OperationalError("SELECT 1", {}, error)

    monkeypatch.setattr(Database, "ping", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=GIB))
    row = doctor(f"database_url = 'sqlite:///{data_dir}/gatehouse.db'")["database"]
    assert (row["state"], row["found"]) == ("wrong", "unavailable: fault")
    assert row["advice"].startswith(advice)


def test_an_error_of_a_database_on_a_full_disk_is_taken_for_its_effect(
    doctor: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_database: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
        raise OperationalError("SELECT 1", {}, error)

    monkeypatch.setattr(Database, "ping", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=0))
    row = doctor(f"database_url = 'sqlite:///{data_dir}/gatehouse.db'")["database"]
    assert (row["state"], row["advice"]) == ("wrong", "free some disk space")


def test_the_process_that_locks_the_database_is_named(doctor: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "BUSY_TIMEOUT_MS", 0)
    with closing(sqlite3.connect(data_dir / "gatehouse.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("BEGIN IMMEDIATE")
        row = doctor(f"database_url = 'sqlite:///{data_dir}/gatehouse.db'")["database"]
    assert (row["state"], row["found"]) == ("wrong", "unavailable: database is locked")
    assert row["advice"] == f"wait for the process with pid {os.getpid()}, which locks it, to finish, or stop it"


@pytest.mark.parametrize(
    ("fault", "advice"),
    [(errno.ENOSPC, "free some disk space"), (errno.EACCES, "give another folder with --data-dir, or change its owner")],
)
def test_the_advice_about_a_data_folder_depends_on_the_fault(
    fault: int, advice: str, doctor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_folder: Path) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(doctor_command, "_try_to_write", fail)
    assert doctor("")["data folder"]["advice"] == advice


@pytest.mark.parametrize("in_model_table", [False, True])
@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        (None, "quantization must be chosen: the checkpoint is fp8 in blocks of 128 x 128"),
        ("awq", "quantization = 'awq' cannot be applied: the checkpoint is fp8 in blocks of 128 x 128"),
        ("int8", None),
    ],
)
def test_a_checkpoint_that_needs_a_chosen_quantization_is_reported(
    quantization: str | None, problem: str | None, in_model_table: bool, doctor: Any, tmp_path: Path
) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "config.json").write_text(json.dumps({**LLAMA_SMALL, "quantization_config": stored}))
    setting = "" if quantization is None else f"quantization = '{quantization}'\n"
    entry = f"[[models]]\nmodel = '{tmp_path / 'blocks'}'\n"
    row = doctor(entry + setting if in_model_table else setting + entry)["model blocks"]
    assert row["state"] == ("ok" if problem is None else "wrong")
    assert problem is None or (row["found"].startswith(problem) and 'quantization = "int8"' in row["found"])


def test_a_model_listed_twice_is_reported(doctor: Any) -> None:
    row = doctor("models = ['gatehouse-demo', 'gatehouse-demo']")["model gatehouse-demo"]
    assert row["state"] == "wrong"
    assert row["found"].startswith("two models are named gatehouse-demo")


def test_a_folder_without_a_model_is_reported(doctor: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    row = doctor(f"models = ['{tmp_path / 'empty'}']")["model empty"]
    assert (row["state"], row["advice"]) == ("wrong", "give --model the folder of a model")
    assert "has no config.json" in row["found"]


def test_the_advice_names_the_setting_instead_of_the_engine_option(doctor: Any) -> None:
    advice = {
        "swap_space_gib = 4096": "correct the setting swap_space_gib, or leave it out for its default",
        "engine_threads = 1024": "correct the setting engine_threads, or leave it out for its default",
        "max_num_seqs = 1024\nblock_size = 1024\nmax_num_batched_tokens = 8": "correct the setting max_num_batched_tokens",
        "speculative = {method = 'ngram', num_speculative_tokens = 33}": "correct the setting speculative, or leave it out",
    }
    for settings, start in advice.items():
        assert doctor(settings)["model gatehouse-demo"]["advice"].startswith(start)


def test_the_advice_for_a_required_setting_is_to_give_it_a_value(doctor: Any, tmp_path: Path) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "config.json").write_text(json.dumps({**LLAMA_SMALL, "quantization_config": stored}))
    row = doctor(f"models = ['{tmp_path / 'blocks'}']")["model blocks"]
    assert row["advice"] == "give quantization a value in the settings"


def test_a_folder_name_that_cannot_name_a_model_is_reported(doctor: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "demo\u200b")
    (row,) = (row for name, row in doctor(f"models = ['{tmp_path}/demo\u200b']").items() if name.startswith("model "))
    assert row["state"] == "wrong"
    assert "cannot name a model" in row["found"]


@pytest.mark.usefixtures("verify_in_process")
def test_a_draft_model_without_weights_is_reported(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "check_model", CHECK_MODEL)
    for number, left_out in enumerate((("tokenizer.json",), ("model.safetensors",))):
        draft = tmp_path / f"draft-{number}"
        shutil.copytree(DEMO_MODEL, draft, ignore=shutil.ignore_patterns(*left_out))
        row = doctor(f"speculative = {{method = 'draft_model', model = '{draft}'}}")["model gatehouse-demo"]
        assert row["state"] == ("wrong" if number else "ok"), row
    assert row["found"].startswith(f"{draft} has no weights")
    assert row["advice"].startswith("correct the setting speculative")


@pytest.mark.parametrize(
    ("config", "problem"),
    [("{", "cannot be read as JSON"), ('{"architectures": ["Unknown"]}', "Unknown"), (None, "has no config.json")],
)
def test_the_advice_about_a_broken_draft_model_names_its_setting(
    config: str | None, problem: str, doctor: Any, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DEMO_MODEL, draft)
    (draft / "config.json").unlink()
    if config is not None:
        (draft / "config.json").write_text(config)
    row = doctor(f"speculative = {{method = 'draft_model', model = '{draft}'}}")["model gatehouse-demo"]
    assert row["state"] == "wrong"
    assert row["found"].startswith("speculative_config field model cannot be served: ")
    assert problem in row["found"]
    assert row["advice"] == "correct the setting speculative, or leave it out for its default"


def test_a_mistyped_model_gets_the_closest_name_as_suggestion(doctor: Any) -> None:
    row = doctor("models = ['gatehouse-dmeo']")["model gatehouse-dmeo"]
    assert row["state"] == "wrong"
    assert row["found"].endswith("nor an added model named 'gatehouse-dmeo'; did you mean 'gatehouse-demo'?")


def test_checking_settings_does_not_import_torch(doctor: Any) -> None:
    loaded = "torch" in sys.modules
    doctor("max_model_len = 2048")
    assert ("torch" in sys.modules) == loaded
