"""Chat templates render as in `transformers`, in a sandbox, with typed errors and a bounded number of loop iterations."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from appliance.api.schemas import MESSAGES_MAX
from engine.text import loop_limit
from engine.text.chat_template import TEMPLATE_CHARS_MAX, ChatTemplate, ChatTemplateError, NoChatTemplate
from tests.support.tiny_tokenizer import write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_a_template_gets_messages_special_tokens_and_add_generation_prompt(model: Path) -> None:
    template = ChatTemplate.load(model)
    assert template.render(MESSAGES) == "<s>user: hi\nassistant: "
    assert template.render(MESSAGES, add_generation_prompt=False) == "<s>user: hi\n"


def test_chat_template_jinja_takes_precedence_over_tokenizer_config_json(model: Path) -> None:
    (model / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert ChatTemplate.load(model).render(MESSAGES) == "own hi"


def test_of_several_named_templates_default_is_used(model: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(model).render(MESSAGES) == "yes"


def test_a_model_without_template_raises_an_error_that_names_llm_generate(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(NoChatTemplate, match=r"no chat template: it is a base model.*LLM\.generate"):
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
def test_a_template_that_fails_or_leaves_the_sandbox_raises_an_error(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_with_a_syntax_error_raises_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_tojson_does_not_escape_html_or_non_ascii_characters() -> None:
    assert ChatTemplate("{{ {'a': '<é>'} | tojson }}", {}).render(MESSAGES) == '{"a": "<é>"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0] | tojson }}",
        "{{ {'b': 1, 'a': ['é', none]} | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ {'b': 'é'} | tojson(ensure_ascii=true, indent=2) }}",
        "{{ {'b': 'é'} | tojson(true) }}",
        "{% if tools is defined and documents is defined %}{{ tools }}, {{ documents }}{% endif %}",
        "{% if tools is not none %}{{ 1 / 0 }}{% endif %}none",
        "a\n  {% generation %}\n  {{ messages[0].content }}\n  {% endgeneration %}\nb",
        "{%- generation -%}  {{ messages[0].content }}  {%- endgeneration -%}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% continue %}x{% endfor %}",
        "{% macro say(m) %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endmacro %}{{ say(messages[0]) }}",
        "{{ bos_token }}|{{ missing }}|{{ add_generation_prompt }}|{{ messages | length }}",
        "{{ strftime_now('%d %b %Y') }}",
    ],
)
def test_a_template_renders_as_it_does_in_transformers(source: str) -> None:
    expected, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == expected[0]


def test_strftime_now_uses_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert ChatTemplate("{{ strftime_now('%z') }}", {}).render(MESSAGES) == "+0545"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{% for %}", "cannot be compiled: line 1: "),
        ("a\nb {{ messages | no_such_filter }}", "cannot be compiled: line 2: .*no_such_filter"),
        ("{% generation %}", "cannot be compiled"),
        ("{{ '" + "x" * TEMPLATE_CHARS_MAX + "' }}", f"at most {TEMPLATE_CHARS_MAX} are accepted"),
        ([{"name": "default"}], "needs a name and a template"),
        ([{"name": "default", "template": 3}], "needs a name and a template"),
        (["default"], "needs a name and a template"),
        (5, "must be text or a list of named templates, not int"),
        ({"default": "x"}, "must be text or a list of named templates, not dict"),
    ],
)
def test_an_invalid_template_raises_a_one_line_error_that_names_the_file(entry: Any, message: str, model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate.load(model)
    assert str(model / "tokenizer_config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_named_templates_without_default_raise_an_error_that_lists_the_names(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(NoChatTemplate, match="no chat template named default, only rag"):
        ChatTemplate.load(model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja cannot be read"),
        ("chat_template.jinja", b"{% for %}", r"chat_template\.jinja cannot be compiled"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json must hold a JSON object"),
        (
            "tokenizer_config.json",
            b'{"chat_template": "x", "bos_token": 7}',
            r"bos_token in .*tokenizer_config\.json must be text",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": "x", "eos_token": {}}',
            r"eos_token in .*tokenizer_config\.json must be text",
        ),
    ],
)
def test_an_unreadable_file_raises_an_error_that_names_it(name: str, content: bytes, message: str, model: Path) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate.load(model)


def test_only_one_module_imports_the_jinja_sandbox() -> None:
    users = [
        path.relative_to(REPO).as_posix()
        for folder in ("appliance/serving", "appliance/api", "engine")
        for path in sorted((REPO / folder).rglob("*.py"))
        if any("sandbox" in ast.unparse(node) for node in ast.walk(ast.parse(path.read_text("utf-8"))) if _is_import(node))
    ]
    assert users == ["engine/text/chat_template.py"]


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


PAIRS = "{% for m in messages %}{% for n in messages[loop.index:] %}{{ loop.length }}{{ n.content }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        PAIRS,
        "{% for m in messages %}{% for n in messages if n.role == 'tool' %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}{% endfor %}",
        "{% macro last(m) %}{% for n in messages %}{% endfor %}{% endmacro %}{% for m in messages %}{{ last(m) }}{% endfor %}",
        "{% for m in messages recursive %}{% if loop.depth < 2 %}{{ loop(messages) }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ (messages | max(attribute='content')).role }}{% endfor %}",
        "{% for m in messages %}{{ messages | batch(2) | list | length }}{% endfor %}",
    ],
    ids=["loops", "conditions", "filters", "macros", "recursion", "extremes", "batches"],
)
def test_a_template_that_iterates_over_all_pairs_of_messages_is_refused_beyond_the_iteration_limit(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_limit, "LOOP_ITERATIONS_MAX", 1000)
    template = ChatTemplate(source, {})
    few = template.render(MESSAGES * 20)
    assert few == template.render(MESSAGES * 20), "iterations are counted per rendering"
    with pytest.raises(ChatTemplateError, match="refuses these messages: its loops take more than 1000 iterations"):
        template.render(MESSAGES * 60)


ACCUMULATED = "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = EXPRESSION %}{% endfor %}{{ ns.text }}"


@pytest.mark.parametrize(
    "expression",
    [
        "ns.text + '\n' + m['content']",
        "ns.text ~ '\n' ~ m.content",
        "m['content'] + ns.text",
        "ns.text + m.content if m else ''",
    ],
)
def test_a_template_that_copies_accumulated_text_for_each_message_is_refused_beyond_the_limit(expression: str) -> None:
    """DeepSeek's templates do this with system messages."""
    template = ChatTemplate(ACCUMULATED.replace("EXPRESSION", expression), {})
    message = {"role": "system", "content": "x" * 2560}
    assert len(template.render([message] * 400)) >= 400 * 2560
    with pytest.raises(ChatTemplateError, match="refuses these messages: its loops take more than"):
        template.render([message] * 4096)


def test_a_template_that_copies_an_accumulated_list_for_each_message_is_refused_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_limit, "LOOP_ITERATIONS_MAX", 1000)
    source = "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
    ChatTemplate(source, {}).render(MESSAGES * 200)
    with pytest.raises(ChatTemplateError, match="refuses these messages: its loops take more than"):
        ChatTemplate(source, {}).render(MESSAGES * 900)


@pytest.mark.parametrize(
    "source",
    [
        PAIRS,
        ACCUMULATED.replace("EXPRESSION", "(ns.text + ('a' + m.content) * 2) ~ (1 + 2)"),
        "{{ 1 + 2 * 3 }}{{ 'a' ~ 1 ~ nothing }}{{ ('a' + 'b') | upper }}{{ [1] + [2] }}{% if 'a' + 'b' == 'ab' %}x{% endif %}",
        "{% for m in messages | map(attribute='content') %}{{ loop.last }}{{ loop.revindex }}{{ m }}{% else %}none{% endfor %}",
        "{{ messages | map(attribute='role') | unique | sort | join(',') }}{{ nothing | map('upper') | list }}",
        "{% for k, v in messages[0].items() recursive %}{{ k }}={{ v }}{% endfor %}",
        "{% for x in nothing %}{% else %}empty{% endfor %}",
        "{% for x in [[1, [2, 3]], [4]] recursive %}{{ loop.depth }}{{ x if x is number else loop(x) }}{% endfor %}",
        "{{ [3, 1, 2] | max }}{{ nothing | min }}{{ messages | batch(2) | list }}{{ messages | slice(2) | list }}",
        "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | list | length }}{% endfor %}",
        "{% for x in range(3) %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}{{ [1, 2] | sum }}",
    ],
)
def test_counting_iterations_does_not_change_the_rendered_text(source: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=source, add_generation_prompt=True)
    assert [ChatTemplate(source, {}).render(messages)] == expected


def test_the_longest_accepted_conversation_may_be_iterated_a_thousand_times() -> None:
    assert 1000 * MESSAGES_MAX <= loop_limit.LOOP_ITERATIONS_MAX
