"""The files of sentence-transformers that say how texts are pooled: what is read, and refusals that name the file or key."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.pooling import PoolingConfig, load_pooling_config
from engine.errors import ModelError, NotAModelDirectory, UnsupportedModel

MODULES, POOLING, LIMITS = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
FILES: dict[str, Any] = {
    MODULES: [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("Transformer", "Pooling")],
    POOLING: {"pooling_mode_mean_tokens": True, "include_prompt": True},
    LIMITS: {"max_seq_length": 32, "do_lower_case": True},
    PROMPTS: {"prompts": {"query": "Query: "}, "default_prompt_name": "query"},
}
ODD_VALUES: tuple[Any, ...] = (None, "x", -1, 0, 1.5, [], {}, True, [1], [[]], {"a": 1}, "", 10**12, float("nan"))


def load(directory: Path, files: dict[str, Any]) -> PoolingConfig:
    """The pooling of a directory with FILES, some of them changed."""
    (directory / "1_Pooling").mkdir(exist_ok=True)
    for name, value in {**FILES, **files}.items():
        (directory / name).write_text(json.dumps(value))
    return load_pooling_config(directory, default_mode="cls")


def test_all_settings_of_the_files_are_read(tmp_path: Path) -> None:
    expected = PoolingConfig(mode="mean", normalised=False, max_len=32, prompt="Query: ", lowercase=True)
    assert load(tmp_path, {}) == expected


def test_prompts_are_pooled_unless_the_files_say_otherwise(tmp_path: Path) -> None:
    assert load(tmp_path, {POOLING: {}}).prompt == "Query: "


@pytest.mark.parametrize(
    ("name", "key", "mode"), [("mean", "mean_tokens", "mean"), ("cls", "cls_token", "cls"), ("lasttoken",) * 2 + ("last",)]
)
def test_pooling_modes_have_a_name_and_an_older_key(name: str, key: str, mode: str, tmp_path: Path) -> None:
    assert load(tmp_path, {POOLING: {"pooling_mode": name}}).mode == mode
    assert load(tmp_path, {POOLING: {"pooling_mode": [name]}}).mode == mode
    others = {f"pooling_mode_{other}": False for other in ("mean_tokens", "cls_token", "lasttoken")}
    assert load(tmp_path, {POOLING: {**others, f"pooling_mode_{key}": True}}).mode == mode


def test_without_a_list_of_modules_the_default_mode_is_normalised(tmp_path: Path) -> None:
    assert load_pooling_config(tmp_path, default_mode="cls") == PoolingConfig(mode="cls", normalised=True, lowercase=False)


def test_vectors_are_normalised_if_the_last_module_says_so(tmp_path: Path) -> None:
    modules = [*FILES[MODULES], {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]
    assert load(tmp_path, {MODULES: modules}).normalised


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_longest_text_may_be_in_a_file_of_any_published_name(kind: str, tmp_path: Path) -> None:
    load(tmp_path, {})
    (tmp_path / LIMITS).rename(tmp_path / f"sentence_{kind}_config.json")
    assert load_pooling_config(tmp_path, default_mode="cls").max_len == 32


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (LIMITS, {"max_seq_length": 0}, "max_seq_length must be a positive integer or null, not 0"),
        (LIMITS, {"max_seq_length": True}, "max_seq_length must be a positive integer or null, not True"),
        (PROMPTS, {"default_prompt_name": "query"}, "default_prompt_name 'query' names no prompt"),
        (PROMPTS, {"default_prompt_name": "query", "prompts": ["query"]}, "default_prompt_name 'query' names no prompt"),
        (POOLING, {"include_prompt": False}, "include_prompt = false with a default prompt is not supported"),
        (POOLING, {"pooling_mode": [["mean"]]}, r"\['mean'\] is not supported; supported: one of mean, cls, lasttoken"),
        (POOLING, {"pooling_mode": 5}, "pooling_mode must be a name or a list of names, not 5"),
        (POOLING, {"pooling_mode": []}, " is not supported; supported: one of mean, cls, lasttoken"),
        (POOLING, {"pooling_mode_cls_token": "true"}, "1_Pooling: pooling_mode_cls_token must be true or false, not 'true'"),
        (POOLING, {"include_prompt": "false"}, "1_Pooling: include_prompt must be true or false, not 'false'"),
        (LIMITS, {"do_lower_case": "false"}, "sentence_bert_config.json: do_lower_case must be true or false, not 'false'"),
        (LIMITS, {"do_lower_case": 1}, "do_lower_case must be true or false, not 1"),
        *(
            (MODULES, [{"type": f"models.{kind}"} for kind in kinds], f"the modules {', '.join(kinds)} are not supported")
            for kinds in (
                ["Pooling"],
                ["Pooling", "Transformer"],
                ["Transformer", "Pooling", "Dense"],
                ["Transformer", "Pooling", "Normalize", "Dense"],
                ["CLIP", "Normalize"],
            )
        ),
        (
            MODULES,
            [{**FILES[MODULES][0], "path": "0_T"}, FILES[MODULES][1]],
            "transformer in the folder '0_T' .* give that folder",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(name: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, {name: value})


@pytest.mark.parametrize("name", [POOLING, LIMITS, PROMPTS])
def test_odd_values_raise_nothing_but_model_errors(name: str, tmp_path: Path) -> None:
    for key in (*FILES[name], "pooling_mode"):
        for value in ODD_VALUES:
            with contextlib.suppress(ModelError):
                load(tmp_path, {name: {**FILES[name], key: value}})


@pytest.mark.parametrize("modules", [{}, [5], [{"path": ""}], [{"type": 5}]], ids=str)
def test_modules_without_types_are_refused(modules: Any, tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match="must hold a list of modules with a type each"):
        load(tmp_path, {MODULES: modules})


def test_the_longest_text_may_be_one_token(tmp_path: Path) -> None:
    assert load(tmp_path, {LIMITS: {"max_seq_length": 1}}).max_len == 1
