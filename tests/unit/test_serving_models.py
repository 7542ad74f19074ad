"""Model folders: errors name what is missing, names are unique, sampling defaults are read; and engines' options."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import SystemClock
from appliance.base.engine_settings import _OPTION_NAMES, EngineSettings
from appliance.base.errors import ModelNotFound
from appliance.base.settings import ENGINE_SWITCHES, ENVIRONMENT_PREFIX, SettingsError, load_settings
from appliance.serving import model_builder
from appliance.serving.engine_readings import tenant_readings
from appliance.serving.model_builder import DEMO_MODEL, build_models, engine_command
from appliance.serving.model_folder import ModelFolder, NotAModel
from appliance.serving.model_registry import ModelRegistry
from appliance.telemetry.metrics import Metrics
from engine.config.model import load_model_config
from engine.errors import EngineConfigError
from engine.main import INTER_TOKEN_TARGET_MS, _engine_options, parse_arguments
from engine.memory.kv_plan import CONTEXT_MIN, check_context
from engine.options import LIMITS, EngineOptions
from engine.protocol import TenantProgress
from engine.speculation.options import SpeculativeOptions
from engine.switches import SWITCHES
from tests.support.served_model import make_hollow_model, make_served_model


def test_a_model_is_named_after_its_directory(tmp_path: Path) -> None:
    assert ModelFolder.check(make_hollow_model(tmp_path / "my-model")).name == "my-model"


@pytest.mark.parametrize(
    "name",
    ["m" * 201, "demo\n", "demo\x1b[31m", "demo\u202e4-tpg", "\u2066demo", "demo ", os.fsdecode(b"demo-\xff")],
    ids=ascii,
)
def test_a_folder_with_a_confusable_name_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(NotAModel, match="cannot name a model") as refused:
        ModelFolder.check(folder)
    assert str(refused.value).isprintable()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match="there is no such folder"):
        ModelFolder.check(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(NotAModel, match=f"it has no {name}"):
        ModelFolder.check(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "part-1.safetensors").touch()
    with pytest.raises(NotAModel, match=r"no part-2\.safetensors"):
        ModelFolder.check(folder)


def test_a_shard_with_a_name_that_is_too_long_is_missing(tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}), "utf-8")
    with pytest.raises(NotAModel, match=f"it has no {'x' * 300}"):
        ModelFolder.check(folder)


def test_a_path_that_the_system_refuses_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match=r"xxx cannot be read: File name too long"):
        ModelFolder.check(tmp_path / ("x" * 300))


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": ["part-1.safetensors"]}}])
def test_an_index_without_files_is_named(index: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(NotAModel, match=r"index\.json cannot be read: its weight_map must give the file of each tensor"):
        ModelFolder.check(folder)


@pytest.mark.parametrize("text", ["{", "[]", 100_000 * "["], ids=["cut", "list", "deep"])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(NotAModel, match=r"config\.json cannot be read"):
        ModelFolder.check(folder)


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_recommended_sampling_is_taken_from_the_folder(
    tmp_path: Path, recommended: dict[str, object], expected: dict[str, object]
) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(recommended), "utf-8")

    assert ModelFolder.check(folder).sampling_defaults == expected


def test_the_context_length_may_be_in_text_config(tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 4096}}), "utf-8")

    assert ModelFolder.check(folder).context_len == 4096


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        ModelRegistry().get("nobody")

    assert caught.value.param == "model"


def test_an_engine_gets_the_options_that_are_set_and_chooses_the_rest(tmp_path: Path) -> None:
    folder = ModelFolder.check(make_hollow_model(tmp_path / "model"))
    settings = load_settings(options={"data_dir": tmp_path, "max_model_len": 512, "swap_space_gib": 1.5}, environ={})
    command = engine_command(folder, settings, 7)
    passed = json.loads(command[-1])

    assert command[1:-1] == ["-m", "engine.main", "--fd", "7", "--options"]
    assert (passed["model"], passed["name"], passed["max_model_len"], passed["swap_space"]) == (
        str(folder.path),
        "model",
        512,
        1.5,
    )
    assert not {"max_num_seqs", "kv_cache_bytes", "quantization", "inter_token_target_ms", "speculative_config"} & passed.keys()


def options_of(folder: Path, **values: Any) -> EngineOptions:
    """Return the options that an engine process gets from these settings."""
    settings = load_settings(options={"data_dir": folder.parent, **values}, environ={})
    return _engine_options(parse_arguments(engine_command(ModelFolder.check(folder), settings, 7)[3:]))


def test_an_engine_that_has_served_on_a_gpu_is_not_started_again_on_the_cpu(tmp_path: Path) -> None:
    folder = ModelFolder.check(make_hollow_model(tmp_path / "model"))
    settings = load_settings(options={"data_dir": tmp_path, "device": "auto"}, environ={})
    devices = [json.loads(engine_command(folder, settings, 7, on_gpu=on_gpu)[-1])["device"] for on_gpu in (False, True)]
    assert devices == ["auto", "cuda"]


def test_each_engine_learns_of_the_models_that_share_its_gpu(tmp_path: Path) -> None:
    first, second, third = (make_hollow_model(tmp_path / name) for name in ("first", "second", "third"))
    assert colocated(options_of(first, models=[str(first), str(second), str(third)])) == [second, third]
    assert colocated(options_of(second, models=[str(first), str(second)])) == [first]
    assert colocated(options_of(first, models=[str(first)])) == []


def colocated(options: EngineOptions) -> list[Path]:
    return [EngineOptions.of(values).model for values in options.colocated_models]


def test_each_engine_has_its_own_settings_and_knows_those_of_the_others(tmp_path: Path) -> None:
    first, second = (make_hollow_model(tmp_path / name) for name in ("first", "second"))
    models = [str(first), {"model": str(second), "quantization": "awq", "speculative": {"method": "ngram"}}]
    given = {"models": models, "quantization": "int8", "max_num_seqs": 4}
    for folder, other in ((first, second), (second, first)):
        options, alone = options_of(folder, **given), options_of(other, **given)
        assert options.quantization == ("int8" if folder is first else "awq")
        assert (options.speculative_config is None, options.max_num_seqs) == (folder is first, 4)
        (neighbour,) = options.colocated_models
        of_other = EngineOptions.of({"name": alone.name, "inter_token_target_ms": INTER_TOKEN_TARGET_MS, **neighbour})
        assert of_other == dataclasses.replace(alone, colocated_models=())


def test_the_default_of_max_tokens_reaches_the_served_model_and_no_engine(tmp_path: Path) -> None:
    first, second = (make_hollow_model(tmp_path / name) for name in ("first", "second"))
    given = {"default_max_tokens": 4096, "models": [str(first), {"model": str(second), "default_max_tokens": 100}]}
    settings = load_settings(options={"data_dir": tmp_path, **given}, environ={})
    served = build_models(settings, clock=SystemClock(), metrics=Metrics(), on_frame=lambda _frame: None)
    assert [model.default_max_tokens for model in served.list()] == [4096, 100]
    assert "default_max_tokens" not in engine_command(ModelFolder.check(first), settings, 7)[-1]


def test_files_of_shared_prefixes_are_not_passed_to_the_engines_of_other_models(tmp_path: Path) -> None:
    """Their paths may be half as long as the longest argument that Linux allows."""
    first, second = (make_hollow_model(tmp_path / name) for name in ("first", "second"))
    (tmp_path / "prefix.txt").write_text("You are helpful.")
    options = options_of(first, models=[str(first), str(second)], shared_prefixes=[str(tmp_path / "prefix.txt")])
    assert options.shared_prefixes
    assert "shared_prefixes" not in options.colocated_models[0]


def test_every_option_of_an_engine_is_a_setting_except_those_of_a_single_model() -> None:
    names = {_OPTION_NAMES.get(field.name, field.name) for field in dataclasses.fields(EngineSettings)}
    assert LIMITS.keys() - names == {"model", "name", "num_kv_blocks", "colocated_models"}
    assert names <= LIMITS.keys()


def test_settings_and_engine_have_the_same_defaults(tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    plain = EngineOptions(model=folder, name="model", inter_token_target_ms=INTER_TOKEN_TARGET_MS)
    assert options_of(folder) == plain


def test_settings_reach_the_engine_under_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "prefix.txt").write_text("You are helpful.")
    prefixes, speculative = [str(tmp_path / "prefix.txt")], {"method": "ngram"}
    values = {"engine_threads": 1, "swap_space_gib": 1.5, "speculative": speculative, "shared_prefixes": prefixes}
    options = options_of(make_hollow_model(tmp_path / "model"), **values, enable_prefix_caching=False)
    assert (options.threads, options.swap_space, options.enable_prefix_caching) == (1, 1.5, False)
    assert options.speculative_config == SpeculativeOptions.parse(speculative)
    assert options.shared_prefixes == (tmp_path / "prefix.txt",)


@pytest.mark.parametrize(
    "option", [name for name, found in LIMITS.items() if found and found[0].words.startswith("must be one")]
)
def test_settings_and_engine_have_the_same_choices(option: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused_setting:
        load_settings(options={"data_dir": tmp_path, option: "none of them"}, environ={})
    with pytest.raises(EngineConfigError) as refused_option:
        EngineOptions.of({"model": "m", option: "none of them"})
    settings, options = (
        {word.strip() for word in str(refused.value).partition(", not")[0].partition("one of ")[2].split(",")}
        for refused in (refused_setting, refused_option)
    )
    assert settings == options


@pytest.mark.parametrize(
    ("setting", "least", "most"),
    [("gpu_memory_utilization", 0.01, 1), ("swap_space_gib", 0, 4096), ("inter_token_target_ms", 0.1, 60_000)],
)
def test_every_valid_setting_is_valid_for_the_engine(setting: str, least: float, most: float, tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    for value in (least, most):
        options_of(folder, **{setting: value})
    with pytest.raises(SettingsError, match=f"{setting} must be a number from {least:g} to"):
        options_of(folder, **{setting: most * 1.01})


def test_a_context_that_no_request_fits_is_refused_by_settings_and_engine_with_the_same_message(tmp_path: Path) -> None:
    folder = make_served_model(tmp_path / "model")
    config = load_model_config(folder)
    with pytest.raises(EngineConfigError) as refused:
        check_context(config, EngineOptions(model=folder, max_model_len=CONTEXT_MIN - 1))
    for given in (CONTEXT_MIN - 1, str(CONTEXT_MIN - 1)):
        with pytest.raises(SettingsError, match=re.escape(f"option {refused.value}")):
            options_of(folder, max_model_len=given)
    check_context(config, options_of(folder, max_model_len=CONTEXT_MIN))
    with pytest.raises(SettingsError, match=f"must be a whole number from {CONTEXT_MIN} to"):
        options_of(folder, max_model_len=0)


def test_settings_and_engine_accept_the_same_number_of_shared_prefixes(tmp_path: Path) -> None:
    folder = make_hollow_model(tmp_path / "model")
    (tmp_path / "prefix.txt").write_text("You are helpful.")
    prefixes = [str(tmp_path / "prefix.txt")] * 256
    assert len(options_of(folder, shared_prefixes=prefixes).shared_prefixes) == 256
    with pytest.raises(SettingsError, match="shared_prefixes must list at most 256 files"):
        options_of(folder, shared_prefixes=[*prefixes, prefixes[0]])


async def test_switches_of_the_settings_reach_the_engine_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = [sys.executable, "-m", "tests.support.fake_engine", "--fd"]  # reports its switches like an engine
    monkeypatch.setattr(model_builder, "engine_command", lambda _folder, _settings, fd, **_: [*stand_in, str(fd)])
    environ = {"GATEHOUSE_GRAPHS": "0", "GATEHOUSE_OVERLAPPED_PREFILL": "0", "GATEHOUSE_MODELS": str(tmp_path / "model")}
    make_hollow_model(tmp_path / "model")
    settings = load_settings(options={"data_dir": tmp_path}, environ=environ)
    (model,) = build_models(settings, clock=SystemClock(), metrics=Metrics(), on_frame=lambda _: None).list()
    model.engine.start()
    try:
        async with asyncio.timeout(300):
            await model.engine.wait_for_state("ready", "failed", "restarting")
        assert model.engine.info is not None, model.engine.error
        assert model.engine.info.switched_off == ["GATEHOUSE_GRAPHS", "GATEHOUSE_OVERLAPPED_PREFILL"]
    finally:
        await model.engine.stop()


def test_the_switches_of_the_settings_are_those_of_the_engine() -> None:
    assert tuple(f"{ENVIRONMENT_PREFIX}{switch.upper()}" for switch in ENGINE_SWITCHES) == SWITCHES


def test_tenants_of_an_engine_are_listed_largest_first_without_the_probe() -> None:
    blocks_by_tenant = [("tn_1", 2), ("tn_2", 9), ("probe", 1)]
    progress = [
        TenantProgress(tenant_id=tenant_id, num_running=1, num_waiting=2, kv_blocks=blocks, service_s=0.5)
        for tenant_id, blocks in blocks_by_tenant
    ]
    readings = tenant_readings(progress, {"tn_1": "bob", "tn_2": "charlie", "tn_3": "dora"})

    assert [(reading.name, reading.kv_blocks) for reading in readings] == [("charlie", 9), ("bob", 2)]
    assert (readings[0].requests_running, readings[0].requests_waiting, readings[0].service_s) == (1, 2, 0.5)
