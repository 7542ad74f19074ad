"""Engine options that concern the device: refused values, memory plans, host tier and block moves, shared prefixes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine import device as device_module
from engine.config.model import load_model_config
from engine.device import resolve_device, unused_gpu
from engine.errors import EngineConfigError
from engine.main import INTER_TOKEN_TARGET_MS, _engine_options, parse_arguments
from engine.memory import main_memory
from engine.memory.kv_plan import plan_memory
from engine.memory.main_memory import check_swap_space
from engine.memory.needs import GIB
from engine.options import EngineOptions
from engine.runner.kv_cache import BlockMover, allocate_kv_cache
from engine.runner.model_runner import ModelRunner
from engine.scheduling.scheduled_batch import BlockMoves
from engine.speculation.options import SpeculativeOptions
from engine.text.shared_prefixes import shared_prefixes
from engine.visible_gpu import NO_ANSWER
from tests.support.engines import generation_request, run_to_end, small_engine
from tests.support.tiny_models import saved_model, saved_text_model


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_model("llama").directory


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("swap_space", -0.1),
        ("swap_space", 1e9),
        ("swap_space", "4"),
        ("swap_space", float("nan")),
        ("batch_invariant", 1),
        ("scheduling_policy", "lifo"),
        ("inter_token_target_ms", 0.0),
        ("inter_token_target_ms", 1e9),
        ("inter_token_target_ms", "25"),
        ("shared_prefixes", (Path("a"),) * 1000),
        ("shared_prefixes", 5),
        ("shared_prefixes", ("a", 5)),
        ("threads", 100_000),
        ("name", 5),
        ("name", ""),
    ],
)
def test_an_invalid_value_is_refused_by_option(option: str, value: Any) -> None:
    with pytest.raises(EngineConfigError) as refused:
        EngineOptions(**{"model": Path("m"), option: value})
    assert refused.value.option == option


@pytest.mark.parametrize(
    ("option", "largest", "beyond"),
    [
        ("name", "x" * 255, "x" * 256),
        ("max_num_seqs", 1024, 1025),
        ("block_size", 1024, 2048),
        ("swap_space", 4096.0, 4096.5),
        ("gpu_memory_utilization", 1.0, 1.001),
        ("inter_token_target_ms", 60_000.0, 60_000.5),
        ("shared_prefixes", (Path("a"),) * 256, (Path("a"),) * 257),
    ],
)
def test_a_value_is_accepted_up_to_its_limit(option: str, largest: Any, beyond: Any) -> None:
    assert getattr(EngineOptions(**{"model": Path("m"), option: largest}), option) == largest
    with pytest.raises(EngineConfigError) as refused:
        EngineOptions(**{"model": Path("m"), option: beyond})
    assert refused.value.option == option


def test_a_step_has_the_token_budget_of_its_device_and_room_for_every_seat() -> None:
    left_open, many_seats = EngineOptions(model=Path("m")), EngineOptions(model=Path("m"), max_num_seqs=600)
    assert [left_open.batched_tokens(device) for device in ("cpu", "cuda")] == [512, 8192]
    assert [many_seats.batched_tokens(device) for device in ("cpu", "cuda")] == [600, 8192]


def test_a_host_tier_smaller_than_a_block_or_larger_than_main_memory_is_refused(model: Path) -> None:
    config = load_model_config(model)
    with pytest.raises(EngineConfigError, match=r"swap_space .* is less than one KV block"):
        plan_memory(config, EngineOptions(model=model, swap_space=1e-9), block_bytes=2048, available_bytes=1 << 20)
    with pytest.raises(EngineConfigError, match=r"swap_space .* is more than 80% of main memory"):
        check_swap_space(EngineOptions(model=model, swap_space=4096.0), "cpu")


def test_the_reason_why_torch_cannot_use_a_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(device_module, "DRIVER", tmp_path)
    reason = r"The NVIDIA driver on your system is too old \(found version 11040\)\. Please update it\."
    with pytest.raises(EngineConfigError, match=rf"device is cuda, but torch finds no usable NVIDIA GPU here.* {reason}$"):
        resolve_device("cuda")
    assert resolve_device("cpu").type == "cpu"
    assert not caplog.records
    assert resolve_device("auto").type == "cpu"
    assert re.search(f"^torch finds no usable GPU. .* {reason}$", unused_gpu("auto", torch.device("cpu")) or "")
    assert unused_gpu("cpu", torch.device("cpu")) is None
    assert re.search(f"serving on the CPU although an NVIDIA driver is installed: .* {reason}$", caplog.text.strip())


def test_a_driver_that_hangs_does_not_hold_up_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the driver was asked"))
    assert resolve_device("cpu").type == "cpu"


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_that_hangs_is_named_instead_of_waited_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "DRIVER", tmp_path)
    monkeypatch.setattr(device_module, "first_visible_gpu", lambda limit_s: (None, f"{NO_ANSWER} within {limit_s:g} s"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch would wait for ever"))
    with pytest.raises(EngineConfigError, match=rf"^device is {name}, but the NVIDIA driver does not answer within 120 s: "):
        resolve_device(name)


def test_a_driver_that_cannot_be_asked_in_another_process_is_asked_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded interpreter may have no program of its own to start."""
    monkeypatch.setattr(device_module, "DRIVER", tmp_path)
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"


def test_without_a_driver_none_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(device_module, "first_visible_gpu", lambda _limit_s: pytest.fail("the driver was asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"


def test_page_locked_memory_is_counted_as_the_next_power_of_two(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_memory, "main_memory_bytes", lambda: 100 << 30)
    options = EngineOptions(model=model, swap_space=65.0)
    check_swap_space(options, "cpu")
    check_swap_space(EngineOptions(model=model, swap_space=64.0), "cuda")
    with pytest.raises(EngineConfigError, match=r"swap_space \(65 GiB\), page-locked as 128 GiB, is more than 80% of main"):
        check_swap_space(options, "cuda")


def test_a_host_tier_that_cannot_be_allocated_is_refused_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no memory\nand a long story")

    caches = [torch.zeros(2, 16, 2, 1, 8)]
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(EngineConfigError, match=r"swap_space \(5120 bytes\) cannot be allocated; lower it: no memory$"):
        BlockMover(caches, 5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_gpu_blocks_override", 10**12),
        ("num_gpu_blocks_override", 10**30),
        ("kv_cache_bytes", 10**18),
        ("threads", 100_000),
        ("shared_prefixes", 5),
        ("shared_prefixes", "file"),
        ("shared_prefixes", [5]),
    ],
)
def test_llm_refuses_values_that_exceed_the_machine_by_option(model: Path, option: str, value: Any) -> None:
    options: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "threads": 1, option: value}
    with pytest.raises(EngineConfigError) as refused:
        LLM(model, device="cpu", **options)
    assert refused.value.option == option
    assert str(refused.value).startswith(option)


def test_a_cache_that_cannot_be_allocated_is_refused_by_option(model: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"kv_cache_bytes \(\d+\) cannot be allocated"):
        allocate_kv_cache(load_model_config(model), 10**15, 16, dtype=torch.float32, device=torch.device("cpu"))


def test_cache_and_host_tier_have_blocks_of_the_same_size(model: Path) -> None:
    options = EngineOptions(model=model, swap_space=100 * 2048 / GIB)
    plan = plan_memory(load_model_config(model), options, block_bytes=2048, available_bytes=90 * 2048)
    assert (plan.num_blocks, plan.num_host_blocks, plan.kv_bytes) == (90, 100, 90 * 2048)


def test_a_draft_model_with_a_shorter_context_drafts_within_it(model: Path) -> None:
    config = SpeculativeOptions(method="draft_model", model=saved_model("llama", max_position_embeddings=64).directory)
    assert small_engine(model, speculative_config=config, max_model_len=64).info.max_model_len == 64


def test_swapped_out_blocks_come_back_unchanged() -> None:
    caches = [torch.randn(6, 4, 2, 3, 5), torch.randn(6, 4, 2, 1, 7)]
    before = [cache.clone() for cache in caches]
    mover = BlockMover(caches, num_host_blocks=3)
    mover.move(BlockMoves(swap_out=[(1, 2), (4, 0)]))
    for cache in caches:
        cache[1:5] = float("nan")
    moves = BlockMoves(swap_in=[(0, 2), (2, 3)], copies=[(2, 5)])
    for _ in range(2):
        mover.move(moves)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[2, 3, 5, 0]], old[[4, 1, 4, 0]])


def test_a_block_swapped_out_in_the_step_that_reuses_it_keeps_its_old_content() -> None:
    cache = torch.arange(3.0).view(3, 1, 1, 1, 1).clone()
    mover = BlockMover([cache], num_host_blocks=2)
    mover.move(BlockMoves(swap_out=[(0, 0)]))
    mover.move(BlockMoves(swap_out=[(1, 1)], swap_in=[(0, 1)], copies=[(1, 2)]))
    assert cache.flatten().tolist() == [0.0, 0.0, 0.0]
    mover.move(BlockMoves(swap_in=[(1, 0)]))
    assert cache.flatten().tolist() == [1.0, 0.0, 0.0]


def test_logits_of_a_long_prompt_are_computed_in_slices(model: Path) -> None:
    engine = small_engine(model)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    runner._slice_rows, logits, max_rows = 3, runner.target.logits, 0

    def recording_logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal max_rows
        max_rows = max(max_rows, hidden.shape[0])
        return logits(hidden)

    runner.target.logits = recording_logits  # type: ignore[method-assign,assignment]
    requests = [generation_request(str(i), list(range(3, 60)), max_tokens=2, prompt_logprobs=2, logprobs=0) for i in range(8)]
    events = run_to_end(engine, requests)
    assert max_rows == 3
    expected = run_to_end(small_engine(model), requests)
    for name, each in events.items():
        scores = [entry.logprob for event in each for entry in event.prompt_logprobs or []]
        assert scores == pytest.approx([e.logprob for event in expected[name] for e in event.prompt_logprobs or []], abs=1e-5)
        assert len(scores) == 56


@pytest.fixture
def prefix_file(tmp_path: Path) -> Path:
    path = tmp_path / "system.txt"
    path.write_text("You are a helpful assistant of the town library. " * 5)
    return path


def test_a_global_prefix_is_computed_once_for_all_tenants(prefix_file: Path) -> None:
    folder = saved_text_model()
    options = EngineOptions(model=folder, shared_prefixes=(prefix_file,))
    token_ids, in_conversation = shared_prefixes(options)
    assert len(in_conversation) > len(token_ids) > 200, "also as the system message of a conversation"
    for is_global, expected in ((True, len(token_ids) // 16 * 16), (False, 0)):
        engine = small_engine(folder, shared_prefixes=(prefix_file,) if is_global else ())
        run_to_end(engine, [generation_request("a", [*token_ids, 5], max_tokens=1)])
        again = run_to_end(engine, [generation_request("b", [*token_ids, 7, 8], tenant_id="bob", max_tokens=1)])["b"]
        assert again[-1].num_cached_tokens == expected


def test_unreadable_shared_prefixes_are_refused_by_option(model: Path, tmp_path: Path, prefix_file: Path) -> None:
    folder = saved_text_model()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfa")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": model, "shared_prefixes": (prefix_file,)}, "need the model's tokenizer"),
        ({"model": folder, "shared_prefixes": (tmp_path / "missing",)}, "missing cannot be read"),
        ({"model": folder, "shared_prefixes": (binary,)}, "binary cannot be read as UTF-8"),
        ({"model": folder, "shared_prefixes": (Path("/dev/zero"),)}, "/dev/zero is larger than 1048576 bytes"),
        ({"model": folder, "shared_prefixes": (prefix_file,), "enable_prefix_caching": False}, "need prefix caching"),
    ]
    for options, message in cases:
        with pytest.raises(EngineConfigError, match=message) as refused:
            shared_prefixes(EngineOptions(**options))
        assert refused.value.option == "shared_prefixes"


def test_command_line_options_become_engine_options() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5}
    given = {"model": "m", "swap_space": 1.5, "speculative_config": config, "shared_prefixes": ["a.txt", "b.txt"]}
    options = _engine_options(parse_arguments(["--fd", "3", "--options", json.dumps(given)]))
    assert (options.model, options.speculative_config) == (Path("m"), SpeculativeOptions.parse(config))
    assert (options.swap_space, options.shared_prefixes) == (1.5, (Path("a.txt"), Path("b.txt")))
    plain = _engine_options(parse_arguments(["--fd", "3", "--options", '{"model": "m"}']))
    assert plain == EngineOptions(model=Path("m"), inter_token_target_ms=INTER_TOKEN_TARGET_MS)


def test_command_line_options_that_are_not_json_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--fd", "3", "--options", "{model"])
    assert ended.value.code == 2
    assert "--options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m", "max_seqs": 3}, "max_seqs is not an option of this engine"),
        ({}, "model must be a path, not None"),
        ({"model": "m", "speculative_config": "ngram"}, "speculative_config must be a mapping of options, not 'ngram'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_unknown_missing_and_malformed_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        EngineOptions.of(options)
