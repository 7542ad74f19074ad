"""`gatehouse simulate`: reports as text and JSON, model folders, and invalid options and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.main import main
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts
from tests.support.published_configs import LLAMA_8B
from tests.support.typed_commands import CommandResult


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 10},tenant-{i % 3},{50 + i},{1 + i % 9}\n" for i in range(60))
    path.write_text(f"arrival_s,tenant,input_tokens,output_tokens\n{rows}")
    return path


@pytest.fixture
def gatehouse_simulate(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path) -> CommandResult:
        capsys.readouterr()
        status = main(["simulate", *map(str, arguments)])
        return CommandResult(status, *capsys.readouterr())

    return run


def test_the_report_is_printed_as_json(gatehouse_simulate: Any, trace: Path) -> None:
    answer = gatehouse_simulate("--trace", trace, "--json", "--slo-ttft-ms", "500", "--slo-tpot-ms", "20", "--speed", "2")
    assert answer.status == 0
    report = answer.json()
    assert report["load"]["requests"] == 60
    assert report["goodput"] == {
        "slo_ttft_ms": 500.0,
        "slo_tpot_ms": 20.0,
        "good_share": 1.0,
        "good_req_per_s": pytest.approx(20.3, abs=0.1),
        "refused": 0,
    }
    assert [tenant["tenant"] for tenant in report["tenants"]] == ["tenant-0", "tenant-1", "tenant-2"]


def test_text_output_has_figures_and_a_table_of_tenants(gatehouse_simulate: Any, trace: Path) -> None:
    answer = gatehouse_simulate("--trace", trace, "--policy", "vtc", "--token-budget", "512", "--weights", "tenant-1=4")
    assert answer.status == 0
    assert "goodput.good_share\t1.0" in answer.out
    assert "\ntenant-1\t4\t20\t" in answer.out


def test_a_scenario_runs_without_a_trace(gatehouse_simulate: Any, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n20,5\n")
    report = gatehouse_simulate("--scenario", "noisy-none", "--lengths", lengths, "--json", "--seed", "3").json()
    assert report["victims"]["good_share"] == 1.0


def test_a_scenario_refuses_options_of_traces(gatehouse_simulate: Any) -> None:
    answer = gatehouse_simulate("--scenario", "noisy-none", "--speed", "2")
    assert answer.status == 2
    assert "require --trace" in answer.err


def test_a_model_can_be_given_as_a_folder(gatehouse_simulate: Any, trace: Path, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "mine", max_position_embeddings=4096)
    report = gatehouse_simulate(
        "--trace", trace, "--model", folder, "--gpu", "h100", "--kv-cache-dtype", "fp8", "--json"
    ).json()
    assert report["setup"]["model"] == "mine"
    assert report["setup"]["max_model_len"] == 4096


def test_options_that_an_engine_refuses_are_refused(gatehouse_simulate: Any, trace: Path) -> None:
    answer = gatehouse_simulate("--trace", trace, "--gpu", "a100", "--kv-cache-dtype", "fp8", "--json")
    assert answer.status == 2
    assert "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or newer, this one has 8.0" in answer.out


def make_model_folder(folder: Path, **changes: Any) -> Path:
    """Write the config.json of a model of Llama-3.1-8B's size into a new `folder`; return the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changes}))
    return folder


def test_a_folder_is_simulated_with_the_quantization_of_its_checkpoint_in_16_bits(
    gatehouse_simulate: Any, trace: Path, tmp_path: Path
) -> None:
    awq = layouts.awq(group_size=128).settings
    folders = {
        "plain": make_model_folder(tmp_path / "plain"),
        "awq": make_model_folder(tmp_path / "awq", quantization_config=awq),
        "wide": make_model_folder(tmp_path / "wide", torch_dtype="float32"),
    }
    blocks = {
        name: gatehouse_simulate("--trace", trace, "--model", each, "--json").json()["setup"]["kv_blocks"]
        for name, each in folders.items()
    }
    known = gatehouse_simulate("--trace", trace, "--json").json()["setup"]["kv_blocks"]
    assert blocks["plain"] == pytest.approx(known, rel=1e-3)
    assert blocks["awq"] * 16 * 131_072 == pytest.approx(blocks["plain"] * 16 * 131_072 + 10.3e9, rel=0.01)
    assert blocks["wide"] == blocks["plain"]


def test_a_decoded_checkpoint_is_simulated_with_the_required_quantization_option(
    gatehouse_simulate: Any, trace: Path, tmp_path: Path
) -> None:
    """A checkpoint that is decoded while it is read has no default quantization."""
    decoded = make_model_folder(tmp_path / "decoded", quantization_config=hub.fp8_blocks(block=(128, 128)).settings)
    refused = gatehouse_simulate("--trace", trace, "--model", decoded)
    assert refused.status == 2
    assert "--quantization must be chosen: the checkpoint is fp8 in blocks of 128 x 128" in refused.err
    for chosen in ("int8", "none"):
        folder, known = (
            gatehouse_simulate("--trace", trace, "--model", each, "--quantization", chosen, "--json").json()["setup"]
            for each in (decoded, "llama-3.1-8b")
        )
        assert folder["quantization"] == known["quantization"] == chosen
        assert folder["kv_blocks"] == pytest.approx(known["kv_blocks"], rel=1e-3)


def test_a_checkpoint_that_the_gpu_cannot_serve_is_refused_with_the_engine_s_message(
    gatehouse_simulate: Any, trace: Path, tmp_path: Path
) -> None:
    fp8 = layouts.fp8(per_row=True, activations="dynamic", compressed=True).settings
    folder = make_model_folder(tmp_path / "fp8", quantization_config=fp8)
    refused = gatehouse_simulate("--trace", trace, "--model", folder, "--gpu", "a100")
    assert refused.status == 2
    assert "--gpu a100 cannot serve this checkpoint: quantization fp8 needs a GPU of compute capability 8.9" in refused.err
    bloom = make_model_folder(tmp_path / "bloom", architectures=["BloomForCausalLM"])
    assert "BloomForCausalLM is not supported" in gatehouse_simulate("--trace", trace, "--model", bloom).err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpu", "abacus"), "--gpu must be one of h200, h100, a100, h20, b200, l40s, l4, rtx-4090"),
        (("--model", "gpt-17"), "--model must be one of llama-3.1-8b"),
        (("--policy", "kind"), "--policy must be one of fair, fcfs, vtc, static"),
        (("--speed", "0"), "--speed must be a positive number"),
        (("--sample", "2"), "--sample must be above 0"),
        (("--tenants", "0"), "--tenants must be between"),
        (("--tenants", "5"), "--tenants is for traces without tenants"),
        (("--token-budget", "0"), "--token-budget must be between 1 and"),
        (("--slo-tpot-ms", "-1"), "--slo-tpot-ms must be a positive number"),
        (("--weights", "alice=0"), "--weights must be NAME=N"),
        (("--weights", "alice"), "--weights must be NAME=N"),
        (("--weights", f"alice={'9' * 5000}"), "--weights must be NAME=N"),
        (("--weights", "alice=2"), "--weights names the tenant 'alice', which has no requests"),
        (("--rate", "5"), "--rate is for traces without arrival times"),
        (("--lengths", "x.csv"), "--lengths requires --scenario"),
        (("--scenario", "noisy-none"), "give either --trace FILE or --scenario NAME"),
    ],
)
def test_an_invalid_option_is_named_as_typed(
    gatehouse_simulate: Any, trace: Path, arguments: tuple[str, ...], named: str
) -> None:
    answer = gatehouse_simulate("--trace", trace, *arguments, "--json")
    assert answer.status == 2
    assert named in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "usage"


def test_a_misgatehouse_simulate_model_is_told_the_closest_one(gatehouse_simulate: Any, trace: Path, tmp_path: Path) -> None:
    known = gatehouse_simulate("--trace", trace, "--model", "LLama-3.1-8", "--json")
    assert known.json()["error"]["message"].endswith("not 'LLama-3.1-8'; did you mean 'llama-3.1-8b'?")
    (tmp_path / "my-model").mkdir()
    folder = gatehouse_simulate("--trace", trace, "--model", tmp_path / "my-modle", "--json")
    assert folder.json()["error"]["message"].endswith(f"; did you mean {str(tmp_path / 'my-model')!r}?")
    unlike = gatehouse_simulate("--trace", trace, "--model", "nothing-alike-at-all", "--json")
    assert unlike.json()["error"]["message"].endswith("not 'nothing-alike-at-all'")


def test_an_invalid_row_of_the_trace_is_named_by_line(gatehouse_simulate: Any, trace: Path) -> None:
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n1,many,1\n")
    answer = gatehouse_simulate("--trace", trace)
    assert answer.status == 1
    assert answer.err == f"gatehouse: {trace}, line 3: input_tokens must be a whole number of tokens, not 'many'\n"
    assert gatehouse_simulate("--trace", trace, "--json").json()["error"]["code"] == "bad_trace"


def test_a_folder_without_a_model_is_refused(gatehouse_simulate: Any, trace: Path, tmp_path: Path) -> None:
    answer = gatehouse_simulate("--trace", trace, "--model", tmp_path, "--json")
    assert answer.status == 1
    assert answer.json()["error"] == {
        "message": f"{tmp_path} has no config.json; give the folder of a Hugging Face model",
        "code": "not_a_model",
    }
