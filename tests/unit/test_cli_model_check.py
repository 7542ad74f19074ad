"""Model checks of `models verify` and `doctor`: the engine's own code in a subprocess, and messages about faults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.base.engine_settings import ModelSettings
from appliance.base.settings import Settings
from appliance.cli import doctor
from appliance.cli.model_check import check_model
from engine.errors import NotAModelDirectory, WeightsError
from engine.verify import verify_model
from engine.visible_gpu import NO_GPU
from tests.support.served_model import make_served_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_served_model(tmp_path / "model")


def reconfigure(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_complete_model_passes_and_its_facts_are_returned(model: Path) -> None:
    fractions: list[float] = []
    facts = check_model(model, progress=fractions.append)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] > 0
    assert fractions == sorted(fractions)


def test_doctor_reports_two_models_with_the_same_name(tmp_path: Path) -> None:
    models = tuple(ModelSettings(str(tmp_path / folder)) for folder in ("a/one", "b/one", "two"))
    checks = doctor._model_names(Settings(data_dir=tmp_path, database_url="sqlite://", models=models))
    assert [(check.name, check.state, check.advice) for check in checks] == [
        ("model one", "wrong", "serve only one of them, or add the other one under another name: gatehouse models add --name")
    ]
    assert checks[0].found == f"two models are named one: {tmp_path}/a/one and {tmp_path}/b/one"
    assert doctor._model_names(Settings(data_dir=tmp_path, database_url="sqlite://")) == []


def test_doctor_reports_unready_parts_without_repeating_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"gateway": "ok", "ledger": "cannot be written", "engine one": "engine of one is loading"}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(503, json={"parts": parts}))
    (check,) = doctor._readiness("http://gatehouse.test")
    assert (check.state, check.found) == ("wrong", "ledger cannot be written, engine of one is loading")


def test_doctor_reports_a_missing_gpu_if_one_model_needs_it(tmp_path: Path) -> None:
    for own, state in ({"device": "cuda"}, "wrong"), ({"device": "cpu"}, "ok"):
        models = (ModelSettings("plain"), ModelSettings("other", own))
        settings = Settings(data_dir=tmp_path, database_url="sqlite://", device="cpu", models=models)
        (check,) = doctor._gpu(settings, None, NO_GPU)
        assert (check.name, check.state) == ("gpu", state)


def test_the_checking_process_inherits_no_settings(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    real: Any = subprocess.Popen

    def record_environment(_command: Any, *, env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        return real(["echo", '{"ok": true}'], env=env, **options)

    monkeypatch.setenv("GATEHOUSE_ADMIN_TOKEN", "a secret")
    monkeypatch.setattr(subprocess, "Popen", record_environment)
    check_model(model)
    check_model(model, switched_off=["early_launch"])

    assert [name for name in environments[0] if name.startswith("GATEHOUSE_")] == []
    assert [name for name in environments[1] if name.startswith("GATEHOUSE_")] == ["GATEHOUSE_EARLY_LAUNCH"]


def test_unexpected_tensors_are_named(model: Path) -> None:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    reconfigure(model, num_hidden_layers=layers - 1)
    with pytest.raises(WeightsError, match=rf"layers\.{layers - 1}\."):
        verify_model(model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "not a tokenizer", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer: .*Model missing"),
        ("chat_template.jinja", "{% if %}", r"chat_template\.jinja cannot be compiled: line 1"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default"}]}',
            r"tokenizer_config\.json: .*needs a name and a template",
        ),
    ],
)
def test_an_invalid_tokenizer_or_template_is_named(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(NotAModelDirectory, match=message):
        verify_model(model)


def test_a_model_without_a_chat_template_passes(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert verify_model(model)["tokenizer_size"] > 0


@pytest.mark.parametrize(
    ("template", "special", "fits"),
    [("{{ messages }}", True, True), ("{{ messages }}<image_soft_token>", True, False), ("{{ messages }}", False, False)],
    ids=["special_token_not_in_template", "special_token_in_template", "ordinary_token"],
)
def test_a_special_token_beyond_the_vocabulary_is_accepted_if_the_template_never_writes_it(
    template: str, special: bool, fits: bool, model: Path
) -> None:
    """As in Gemma 3 1B, whose tokenizer has the image placeholder of larger models beyond the last row of the embedding."""
    beyond = verify_model(model)["vocab_size"]
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": beyond, "content": "<image_soft_token>", "special": special, **flags})
    for token_id in range(len(tokenizer["model"]["vocab"]), beyond):
        tokenizer["model"]["vocab"][f"filler {token_id}"] = token_id
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "chat_template.jinja").write_text(template)
    if fits:
        assert verify_model(model)["tokenizer_size"] == beyond + 1
        return
    with pytest.raises(NotAModelDirectory, match=f"has {beyond + 1} tokens, but the model's vocabulary is {beyond}"):
        verify_model(model)
