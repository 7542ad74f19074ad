"""`gatehouse plan`: memory by part, remedies, several models on one GPU, and invalid options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from appliance.cli import model_store
from appliance.cli.main import main
from appliance.cli.plan import plan
from appliance.cli.simulate import simulate
from appliance.serving.model_builder import DEMO_MODEL
from engine.simulator.models import GPUS
from tests.support.typed_commands import CommandResult


@pytest.fixture
def gatehouse_plan(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> CommandResult:
        capsys.readouterr()
        status = main(["plan", *arguments])
        return CommandResult(status, *capsys.readouterr())

    return run


def test_the_parts_of_a_plan_add_up_to_the_usable_memory(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--gpu", "h100", "--json")
    assert answer.status == 0
    plan = json.loads(answer.out)
    names = ("weights", "activations", "graphs", "slots", "rotary_tables", "device_context", "kv_cache")
    total = sum(plan[f"{name}_bytes"] for name in names)
    assert 0 <= plan["usable_bytes"] - total < 16 * 131_072
    assert plan["kv_tokens"] == plan["num_kv_blocks"] * 16
    assert plan["max_model_len"] == 131_072
    assert plan["requests_of_that_length"] == plan["kv_tokens"] // 131_072
    assert plan["note"] is None


def test_a_plan_names_its_gpu_and_depends_on_its_memory(gatehouse_plan: Any) -> None:
    plans = {gpu: gatehouse_plan("llama-3.1-8b", "--gpu", gpu) for gpu in ("h200", "H100", "a100", "h20")}
    for gpu, answer in plans.items():
        assert answer.out.splitlines()[:2] == ["model\tllama-3.1-8b", f"gpu\t{gpu.lower()}"]
    tokens = {gpu: json.loads(gatehouse_plan("llama-3.1-8b", "--gpu", gpu, "--json").out)["kv_tokens"] for gpu in plans}
    assert tokens["H100"] == tokens["a100"] < tokens["h20"] < tokens["h200"]


def test_the_help_lists_every_known_gpu() -> None:
    for command in (plan, simulate):
        (option,) = (hint for hint in get_type_hints(command, include_extras=True)["gpu"].__metadata__)
        assert option.help.removeprefix("GPU: ").removesuffix(".").replace(" or ", ", ").split(", ") == list(GPUS)


def test_an_8_bit_cache_holds_twice_the_tokens(gatehouse_plan: Any) -> None:
    plain, halved = (json.loads(gatehouse_plan("qwen3-8b", "--json", *more).out) for more in ((), ("--kv-cache-dtype", "fp8")))
    assert halved["kv_tokens"] == pytest.approx(2 * plain["kv_tokens"], rel=2e-3)


def test_a_shortened_context_is_explained_with_remedies(gatehouse_plan: Any) -> None:
    plan = json.loads(gatehouse_plan("llama-3.1-8b", "--memory-gib", "24", "--json").out)
    assert plan["max_model_len"] < 131_072
    assert "kv_cache_dtype=fp8" in plan["note"]


def test_text_output_is_in_gib_with_one_remedy_per_line(gatehouse_plan: Any) -> None:
    lines = gatehouse_plan("llama-3.1-8b", "--memory-gib", "24").out.splitlines()
    printed = dict(line.split("\t") for line in lines if "\t" in line)
    assert printed["weights"] == "15.0 GiB"
    assert printed["usable"] == "21.6 GiB"
    assert not any(key.endswith("_bytes") for key in printed)
    assert printed["note"].startswith("the context is shorter than the model's: needs 33.8 GiB")
    assert printed["note"].endswith("; what would make it fit:")
    plan = json.loads(gatehouse_plan("llama-3.1-8b", "--memory-gib", "24", "--json").out)
    changes = [f"  {remedy['change']}: max_model_len={remedy['max_model_len']}" for remedy in plan["remedies"]]
    assert lines[-len(changes) :] == changes
    assert f"  a shorter context: max_model_len={plan['max_model_len']}" in changes


def test_a_plan_shows_the_usable_share_of_gpu_memory(gatehouse_plan: Any) -> None:
    options = "llama-3.1-8b", "--memory-gib", "24", "--gpu-memory-utilization", "0.75"
    plan = json.loads(gatehouse_plan(*options, "--json").out)
    assert (plan["gpu_memory_utilization"], plan["memory_bytes"], plan["usable_bytes"]) == (0.75, 24 << 30, 18 << 30)
    assert plan["remedies"][1]["change"] == "a larger share of the card (gpu_memory_utilization=0.95)"
    printed = dict(line.split("\t") for line in gatehouse_plan(*options).out.splitlines() if "\t" in line)
    assert (printed["memory"], printed["gpu_memory_utilization"], printed["usable"]) == ("24.0 GiB", "0.75", "18.0 GiB")
    assert "and 18.0 GiB may be used (gpu_memory_utilization=0.75 of 24.0 GiB)" in printed["note"]


def test_a_model_that_fits_has_no_remedies(gatehouse_plan: Any) -> None:
    assert json.loads(gatehouse_plan("llama-3.1-8b", "--json").out)["remedies"] == []
    assert gatehouse_plan("llama-3.1-8b").out.splitlines()[-1] == "note\t-"


@pytest.mark.parametrize("memory", ["-3", "0", "nan", "inf", "1e9"])
def test_an_impossible_amount_of_memory_is_refused(gatehouse_plan: Any, memory: str) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--memory-gib", memory, "--json")
    assert answer.status == 2
    assert json.loads(answer.out)["error"]["code"] == "invalid_option"
    assert "memory_gib must be above 0 and at most 65536" in json.loads(answer.out)["error"]["message"]


def test_a_model_that_does_not_fit_fails_with_remedies(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--memory-gib", "12")
    assert answer.status == 1
    assert answer.out == ""
    assert "llama-3.1-8b does not fit: it needs" in answer.err
    assert "\n  weights in 8 bits (quantization=int8 or fp8): max_model_len=" in answer.err
    as_json = json.loads(gatehouse_plan("llama-3.1-8b", "--memory-gib", "12", "--json").out)["error"]
    assert as_json["code"] == "does_not_fit"
    assert "; what would make it fit: weights in 8 bits" in as_json["message"]


def test_a_requested_context_is_never_shortened(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--memory-gib", "24", "--max-model-len", "131072")
    assert answer.status == 1
    assert "what would make it fit" in answer.err


def test_models_on_one_gpu_get_caches_of_equally_many_tokens(gatehouse_plan: Any) -> None:
    large = json.loads(gatehouse_plan("llama-3.1-8b", "--beside", "qwen3-0.6b", "--json").out)
    small = json.loads(gatehouse_plan("qwen3-0.6b", "--beside", "llama-3.1-8b", "--json").out)
    assert abs(large["kv_tokens"] - small["kv_tokens"]) <= 16
    assert large["other_models_bytes"] + small["other_models_bytes"] <= large["usable_bytes"] * 1.001
    assert "other_models" in gatehouse_plan("qwen3-0.6b", "--beside", "llama-3.1-8b").out
    assert "other_models" not in gatehouse_plan("qwen3-0.6b").out
    alone = json.loads(gatehouse_plan("llama-3.1-8b", "--json").out)
    assert alone["other_models_bytes"] == 0


def test_remedies_for_several_models_apply_to_all_of_them(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--beside", "llama-3.1-8b", "--memory-gib", "24")
    assert answer.status == 1
    assert "the other models of this GPU 1" in answer.err
    assert "what would make it fit, for all models of this GPU:\n  weights in 8 bits" in answer.err
    assert "max_model_len about " in answer.err
    fitting = gatehouse_plan("llama-3.1-8b", "--beside", "llama-3.1-8b", "--memory-gib", "24", "--quantization", "int8")
    assert fitting.status == 0


@pytest.mark.parametrize(
    ("beside", "options", "problem"),
    [
        ("llama-3.1-8b", ("--memory-gib", "12"), "model llama-3.1-8b does not fit: needs"),
        ("qwen3-8b", ("--max-model-len", "100000"), "max_model_len (100000) is longer than the model's context (40960)"),
    ],
)
def test_another_model_that_its_engine_refuses_is_named_and_not_counted(
    beside: str, options: tuple[str, ...], problem: str, gatehouse_plan: Any
) -> None:
    name = "llama-3.2-1b"
    answer = gatehouse_plan(name, *options, "--beside", beside, "--beside", name)
    assert answer.status == 0
    assert answer.err.startswith(f"{beside} is not counted: its engine would refuse it: {problem}")
    assert answer.out == gatehouse_plan(name, *options, "--beside", name).out
    plan = gatehouse_plan(name, *options, "--beside", beside, "--json").json()
    assert plan["other_models_bytes"] == 0
    assert [refused["model"] for refused in plan["refused_beside"]] == [beside]
    assert plan["refused_beside"][0]["problem"].startswith(problem)
    assert gatehouse_plan(name, *options, "--json").json()["refused_beside"] == []


def test_another_model_of_an_unsupported_architecture_is_named_and_not_counted(gatehouse_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    answer = gatehouse_plan("qwen3-0.6b", "--beside", str(tmp_path))
    assert answer.status == 0
    assert answer.err.startswith(f"{tmp_path.name} is not counted: its engine would refuse it: architecture BertModel")
    assert answer.out == gatehouse_plan("qwen3-0.6b").out


def test_a_folder_of_another_model_that_cannot_be_read_is_named(gatehouse_plan: Any, tmp_path: Path) -> None:
    answer = gatehouse_plan("qwen3-0.6b", "--beside", str(tmp_path))
    assert answer.status == 2
    assert f"{tmp_path} has no config.json" in answer.err


def test_another_model_that_is_unknown_is_refused(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("qwen3-8b", "--beside", "gpt-9")
    assert answer.status == 2
    assert "not 'gpt-9'" in answer.err


def test_4_bit_weights_fit_where_16_bit_weights_do_not(gatehouse_plan: Any) -> None:
    assert gatehouse_plan("llama-3.1-8b", "--memory-gib", "10", "--quantization", "int4").status == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpu", "h300"),
        ("--quantization", "int3"),
        ("--kv-cache-dtype", "int8"),
        ("--max-model-len", "131073"),
        ("--max-model-len", "0"),
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "4097"),
        ("--gpu-memory-utilization", "1.5"),
    ],
)
def test_an_invalid_option_is_named(gatehouse_plan: Any, option: str, value: str) -> None:
    answer = gatehouse_plan("llama-3.1-8b", option, value)
    assert answer.status == 2
    assert option.strip("-").replace("-", "_") in answer.err


def test_a_step_budget_below_the_number_of_requests_is_refused_as_by_the_engine(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("llama-3.1-8b", "--max-num-seqs", "8", "--max-num-batched-tokens", "4")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == "gatehouse: max_num_batched_tokens must be at least max_num_seqs (8), not 4\n"


def test_an_unknown_model_is_refused_with_the_known_ones(gatehouse_plan: Any) -> None:
    answer = gatehouse_plan("gpt-9")
    assert answer.status == 2
    assert "qwen3-8b" in answer.err


def test_a_mistyped_model_gets_the_closest_name_as_suggestion(gatehouse_plan: Any, two_models: Path) -> None:
    for mistyped, meant in ("qwen3-8", "qwen3-8b"), ("othr", "other"), ("gatehouse-dmeo", "gatehouse-demo"):
        for arguments in (mistyped,), ("qwen3-8b", "--beside", mistyped):
            answer = gatehouse_plan(*arguments, "--data-dir", str(two_models))
            assert answer.status == 2
            assert answer.err.endswith(f"not {mistyped!r}; did you mean {meant!r}?\n")
    answer = gatehouse_plan(f"{two_models}/models/othr")
    assert answer.err.endswith(f"; did you mean '{two_models}/models/other'?\n")
    (two_models / "gatehouse.toml").write_text("models = ['othr']")
    answer = gatehouse_plan("--data-dir", str(two_models))
    assert answer.status == 1
    assert answer.err.endswith("nor an added model named 'othr'; did you mean 'other'?\n")


def test_added_models_and_the_demo_model_are_planned_by_name(gatehouse_plan: Any, tmp_path: Path) -> None:
    model_store.link(DEMO_MODEL, model_store.new_model_path("tiny", tmp_path))
    for name in ("tiny", DEMO_MODEL.name):
        plan = json.loads(gatehouse_plan(name, "--data-dir", str(tmp_path), "--json").out)
        assert (plan["model"], plan["max_model_len"]) == (name, 1024)


def test_a_folder_takes_precedence_over_a_known_name(
    gatehouse_plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    shutil.copy(DEMO_MODEL / "config.json", tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    assert json.loads(gatehouse_plan("qwen3-8b", "--json").out)["max_model_len"] == 1024


@pytest.mark.parametrize("options", [("--kv-cache-dtype", "fp8"), ("--quantization", "fp8")])
def test_fp8_is_refused_and_not_suggested_for_a_gpu_without_it(gatehouse_plan: Any, options: tuple[str, str]) -> None:
    refused = gatehouse_plan("llama-3.1-8b", "--gpu", "a100", *options)
    assert refused.status == 2
    assert "fp8 needs a GPU of compute capability 8.9 or newer, this one has 8.0" in refused.err
    offered = gatehouse_plan("llama-3.1-8b", "--gpu", "a100", "--memory-gib", "12")
    assert "quantization=int8)" in offered.err
    assert "fp8" not in offered.err


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    """The data folder of an appliance with two models, one of which has settings of its own."""
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "other")
    (tmp_path / "gatehouse.toml").write_text(
        """
        gpu_memory_utilization = 0.8
        [[models]]
        model = "gatehouse-demo"
        [[models]]
        model = "other"
        quantization = "int8"
        max_model_len = 256
        """
    )
    return tmp_path


def test_without_a_model_argument_all_configured_models_are_planned_together(gatehouse_plan: Any, two_models: Path) -> None:
    answer = gatehouse_plan("--data-dir", str(two_models), "--memory-gib", "8", "--json")
    assert answer.status == 0
    demo, other = json.loads(answer.out)["data"]
    assert (demo["model"], other["model"], other["gpu"]) == ("gatehouse-demo", "other", "h200")
    assert (demo["gpu_memory_utilization"], other["max_model_len"]) == (0.8, 256)
    assert other["weights_bytes"] < 0.8 * demo["weights_bytes"]
    assert demo["kv_tokens"] == pytest.approx(other["kv_tokens"], abs=16)
    assert demo["other_models_bytes"] + other["other_models_bytes"] == pytest.approx(demo["usable_bytes"], rel=1e-3)
    words = gatehouse_plan("--data-dir", str(two_models)).out.split("\n\n")
    assert [part.splitlines()[0] for part in words] == ["model\tgatehouse-demo", "model\tother"]


def test_a_configured_cache_size_is_planned(gatehouse_plan: Any, two_models: Path) -> None:
    settings = two_models / "gatehouse.toml"
    settings.write_text(settings.read_text() + '        kv_cache_bytes = "512 MiB"\n')
    demo, other = json.loads(gatehouse_plan("--data-dir", str(two_models), "--memory-gib", "8", "--json").out)["data"]
    assert other["kv_cache_bytes"] == pytest.approx(512 << 20, rel=1e-3)
    assert demo["kv_cache_bytes"] > 2 * other["kv_cache_bytes"]
    refused = gatehouse_plan("--data-dir", str(two_models), "--memory-gib", "2.4")
    assert refused.status == 1
    assert "other models of this GPU" in refused.err


def test_a_configured_cache_smaller_than_a_context_is_explained(gatehouse_plan: Any, two_models: Path) -> None:
    entry = '[[models]]\nmodel = "gatehouse-demo"\nkv_cache_bytes = "2 MiB"\n'
    (two_models / "gatehouse.toml").write_text(entry)
    (plan,) = gatehouse_plan("--data-dir", str(two_models), "--json").json()["data"]
    assert plan["max_model_len"] == plan["kv_tokens"] == 576
    note = "the context is shorter than the model's: kv_cache_bytes has room for 576 tokens, 1024 tokens need 3670016 bytes"
    assert plan["note"] == note
    assert f"note\t{note}\n" in gatehouse_plan("--data-dir", str(two_models)).out
    (two_models / "gatehouse.toml").write_text(entry + "max_model_len = 100\n")
    (plan,) = gatehouse_plan("--data-dir", str(two_models), "--json").json()["data"]
    assert (plan["max_model_len"], plan["note"]) == (100, None)


def test_a_configured_model_on_the_cpu_is_named_and_not_planned(gatehouse_plan: Any, two_models: Path) -> None:
    settings = two_models / "gatehouse.toml"
    settings.write_text(settings.read_text() + '        device = "cpu"\n')
    answer = gatehouse_plan("--data-dir", str(two_models), "--json")
    (demo,) = json.loads(answer.out)["data"]
    assert (demo["model"], demo["other_models_bytes"]) == ("gatehouse-demo", 0)
    assert answer.err == "other is not planned: its device is cpu\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_model_len = 2048", "max_model_len (2048) is longer than the model's context"),
        ('quantization = "awq"', "quantization = 'awq' cannot be applied"),
        ('kv_cache_bytes = "900 GiB"', "kv_cache_bytes (966367641600 bytes, 900.0 GiB) is too much"),
        (
            'block_size = 1024\nkv_cache_bytes = "1 MiB"',
            "kv_cache_bytes (1048576 bytes) is less than one KV block: no request fits. A block of 1024 tokens takes",
        ),
    ],
)
def test_an_invalid_option_of_a_configured_model_is_reported_with_its_model(
    line: str, words: str, gatehouse_plan: Any, two_models: Path
) -> None:
    (two_models / "gatehouse.toml").write_text(f'[[models]]\nmodel = "gatehouse-demo"\n[[models]]\nmodel = "other"\n{line}')
    answer = gatehouse_plan("--data-dir", str(two_models))
    assert answer.status
    assert answer.err.startswith(f"gatehouse: model other: {words}")


def test_with_all_models_on_the_cpu_each_is_named_as_not_planned(gatehouse_plan: Any, two_models: Path) -> None:
    settings = two_models / "gatehouse.toml"
    settings.write_text('device = "cpu"\n' + settings.read_text())
    answer = gatehouse_plan("--data-dir", str(two_models))
    assert (answer.status, answer.out) == (0, "")
    assert answer.err == "".join(f"{name} is not planned: its device is cpu\n" for name in ("gatehouse-demo", "other"))


def test_configured_models_that_do_not_fit_together_are_reported(gatehouse_plan: Any, two_models: Path) -> None:
    refused = gatehouse_plan("--data-dir", str(two_models), "--memory-gib", "1.5", "--json")
    assert (refused.status, refused.json()["error"]["code"]) == (1, "does_not_fit")
    assert "model gatehouse-demo does not fit: needs" in refused.out


@pytest.mark.parametrize("option", [["--dtype", "float16"], ["--enforce-eager"], ["--beside", "qwen3-0.6b"]], ids=" ".join)
def test_engine_options_without_a_model_argument_are_refused(option: list[str], gatehouse_plan: Any, two_models: Path) -> None:
    refused = gatehouse_plan("--data-dir", str(two_models), *option)
    assert refused.status == 2
    assert f"{option[0]} requires a MODEL" in refused.err
