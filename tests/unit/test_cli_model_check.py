"""`models verify` runs the engine's own code in another process: a whole model passes, a wrong one is named."""

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


def test_a_whole_model_passes_with_its_facts(model: Path) -> None:
    fractions: list[float] = []
    facts = check_model(model, progress=fractions.append)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] > 0
    assert fractions == sorted(fractions)


def test_doctor_says_that_two_models_would_be_served_under_one_name(tmp_path: Path) -> None:
    models = tuple(ModelSettings(str(tmp_path / folder)) for folder in ("a/one", "b/one", "two"))
    checks = doctor._model_names(Settings(data_dir=tmp_path, database_url="sqlite://", models=models))
    assert [(check.name, check.state, check.advice) for check in checks] == [
        ("model one", "wrong", "serve only one of them, or add the other one under another name: gatehouse models add --name")
    ]
    assert checks[0].found == f"two models are named one: {tmp_path}/a/one and {tmp_path}/b/one"
    assert doctor._model_names(Settings(data_dir=tmp_path, database_url="sqlite://")) == []


def test_doctor_does_not_say_twice_which_engine_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"gateway": "ok", "ledger": "cannot be written", "engine one": "engine of one is loading"}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(503, json={"parts": parts}))
    (check,) = doctor._readiness("http://gatehouse.test")
    assert (check.state, check.found) == ("wrong", "ledger cannot be written, engine of one is loading")


def test_doctor_misses_a_gpu_for_the_one_model_that_must_have_it(tmp_path: Path) -> None:
    for own, state in ({"device": "cuda"}, "wrong"), ({"device": "cpu"}, "ok"):
        models = (ModelSettings("plain"), ModelSettings("other", own))
        settings = Settings(data_dir=tmp_path, database_url="sqlite://", device="cpu", models=models)
        (check,) = doctor._gpu(settings, None, NO_GPU)
        assert (check.name, check.state) == ("gpu", state)


def test_the_checker_inherits_no_setting_of_ours(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    real: Any = subprocess.Popen

    def watched(_command: Any, *, env: dict[str, str], **options: Any) -> Any:
        given.append(env)
        return real(["echo", '{"ok": true}'], env=env, **options)

    monkeypatch.setenv("GATEHOUSE_ADMIN_TOKEN", "a secret")
    monkeypatch.setattr(subprocess, "Popen", watched)
    check_model(model)
    check_model(model, switched_off=["early_launch"])

    assert [name for name in given[0] if name.startswith("GATEHOUSE_")] == []
    assert [name for name in given[1] if name.startswith("GATEHOUSE_")] == ["GATEHOUSE_EARLY_LAUNCH"]


def test_tensors_that_the_configuration_does_not_ask_for_are_named(model: Path) -> None:
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
def test_a_tokenizer_or_a_template_that_cannot_be_read_is_told(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(NotAModelDirectory, match=message):
        verify_model(model)


def test_a_model_without_a_chat_template_passes(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert verify_model(model)["tokenizer_size"] > 0


@pytest.mark.parametrize(
    ("template", "special", "fits"),
    [("{{ messages }}", True, True), ("{{ messages }}<image_soft_token>", True, False), ("{{ messages }}", False, False)],
    ids=["never_written", "in_the_template", "plain_text"],
)
def test_a_special_token_beyond_the_vocabulary_is_let_pass_if_no_conversation_holds_it(
    template: str, special: bool, fits: bool, model: Path
) -> None:
    """As in Gemma 3 1B, whose tokenizer has the place of an image, of larger models, behind the last row of its embedding."""
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
