"""Tokens to text and back, streams that wait for whole characters, and templates that cannot leave their sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import NotAModelDirectory
from engine.text import ChatTemplate, ChatTemplateError, Tokenizer
from tests.support.tiny_tokenizer import write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 🙂", "<s> is special"])
def test_text_survives_the_way_to_tokens_and_back(text: str, model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_stream_gives_the_whole_text_and_no_broken_character(model: Path) -> None:
    tokenizer = Tokenizer(model)
    text = "né 世界 🙂!"
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_special_tokens_have_no_text_in_answers(model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode([*tokenizer.encode("end"), tokenizer.token_to_id("</s>") or 0]) == "end"


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NotAModelDirectory, match="holds no tokenizer model"):
        Tokenizer(tmp_path)


def test_a_template_sees_messages_and_special_tokens(model: Path) -> None:
    template = ChatTemplate.load(model)
    assert template.render(MESSAGES) == "<s>user: hi\nassistant: "
    assert template.render(MESSAGES, add_generation_prompt=False) == "<s>user: hi\n"


def test_a_template_in_its_own_file_wins(model: Path) -> None:
    (model / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert ChatTemplate.load(model).render(MESSAGES) == "own hi"


def test_the_default_of_several_named_templates_is_taken(model: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(model).render(MESSAGES) == "yes"


def test_a_model_without_template_says_that_it_is_a_base_model(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{% for i in range(999999999) %}{% endfor %}", "refuses these messages"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_that_cannot_be_compiled_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_json_in_templates_is_plain() -> None:
    assert ChatTemplate("{{ {'a': '<é>'} | tojson }}", {}).render(MESSAGES) == '{"a": "<é>"}'
