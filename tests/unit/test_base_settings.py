"""Settings: sources and precedence, parsing, settings per model, and errors that name the setting but no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.base import settings
from appliance.base.engine_settings import ModelSettings
from appliance.base.setting_values import MIB
from appliance.base.settings import SettingsError, default_data_dir, load_settings, local_url


def load(tmp_path: Path, file: str = "", environ: dict[str, str] | None = None, **options: object) -> settings.Settings:
    (tmp_path / "gatehouse.toml").write_text(file)
    return load_settings(options={"data_dir": tmp_path, **options}, environ=environ or {})


def names(found: settings.Settings) -> list[str]:
    return [model.model for model in found.models]


def test_without_settings_the_defaults_apply(tmp_path: Path) -> None:
    found = load_settings(options={"data_dir": tmp_path, "port": None}, environ={"PATH": "/bin"})
    assert (found.host, found.port, found.models, found.device) == ("127.0.0.1", 8000, (), "auto")
    assert found.database_url == f"sqlite:///{tmp_path}/gatehouse.db"
    assert found.max_body_bytes == 10 * MIB


def test_options_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = "port = 1\nmax_num_seqs = 1\nlog_level = 'debug'"
    environ = {"GATEHOUSE_PORT": "2", "GATEHOUSE_MAX_NUM_SEQS": "2"}
    found = load(tmp_path, file, environ, port=3)
    assert (found.port, found.max_num_seqs, found.log_level) == (3, 2, "debug")


def test_the_settings_file_is_read_from_the_data_folder_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "gatehouse.toml").write_text("port = 99")
    found = load_settings(options={}, environ={"GATEHOUSE_DATA_DIR": str(tmp_path)})
    assert (found.data_dir, found.port) == (tmp_path, 99)


def test_values_are_parsed_from_text_and_from_toml(tmp_path: Path) -> None:
    file = "models = ['a', 'b']\nsecure_cookies = true\ndrain_timeout_s = 1.5\nkv_cache_bytes = '2 GiB'"
    found = load(tmp_path, file)
    assert (names(found), found.secure_cookies, found.drain_timeout_s) == (["a", "b"], True, 1.5)
    assert found.kv_cache_bytes == 2048 * MIB
    environ = {"GATEHOUSE_MODELS": "a, b", "GATEHOUSE_SECURE_COOKIES": "yes", "GATEHOUSE_MAX_BODY_BYTES": "1MiB"}
    found = load(tmp_path, "", environ, models=("c",))
    assert (names(found), found.secure_cookies, found.max_body_bytes) == (["c"], True, MIB)


MODEL_TABLES = """
quantization = "int8"
max_num_seqs = 8

[[models]]
model = "/m/plain"

[[models]]
model = " /m/awq "
quantization = "awq"
max_model_len = 4096
"""
MODEL_LIST = '["/m/plain", {"model": "/m/awq", "quantization": "AWQ", "max_model_len": "4096"}]'


@pytest.mark.parametrize(
    ("file", "environ"), [(MODEL_TABLES, {}), ("quantization='int8'\nmax_num_seqs=8", {"GATEHOUSE_MODELS": MODEL_LIST})]
)
def test_a_model_can_have_engine_settings_of_its_own(file: str, environ: dict[str, str], tmp_path: Path) -> None:
    found = load(tmp_path, file, environ)
    plain, awq = (found.for_model(model) for model in found.models)
    assert found.models[1] == ModelSettings("/m/awq", {"quantization": "awq", "max_model_len": 4096})
    assert (plain.quantization, plain.max_model_len, plain.max_num_seqs) == ("int8", None, 8)
    assert (awq.quantization, awq.max_model_len, awq.max_num_seqs) == ("awq", 4096, 8)


@pytest.mark.parametrize(
    ("file", "environ"), [("default_max_tokens = 4096", {}), ("", {"GATEHOUSE_DEFAULT_MAX_TOKENS": "4096"})]
)
def test_the_default_of_max_tokens_is_set_for_all_models_or_for_one(file: str, environ: dict[str, str], tmp_path: Path) -> None:
    tables = "[[models]]\nmodel = '/m/plain'\n[[models]]\nmodel = '/m/terse'\ndefault_max_tokens = 100"
    found = load(tmp_path, f"{file}\n{tables}", environ)
    assert [found.for_model(model).default_max_tokens for model in found.models] == [4096, 100]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("{'model'='/m', 'quantisation'='int8'}", "has an unknown setting for /m: quantisation; did you mean 'quantization'"),
        ("{'model'='/m', 'default_max_token'=1}", "has an unknown setting for /m: default_max_token"),
        (
            "{'model'='/m', 'default_max_tokens'=0}",
            "has an invalid setting for /m: default_max_tokens must be a whole number from 1 to 10000000",
        ),
        (
            "{'model'='/m', 'port'=1}",
            "has an invalid setting for /m: port is a setting of the whole appliance; put it above the first",
        ),
        ("{'model'='/m', 'quantization'='int3'}", "has an invalid setting for /m: quantization must be one of int8, fp8, none"),
        (
            "{'model'='/m', 'max_num_seqs'=true}",
            "has an invalid setting for /m: max_num_seqs must be a whole number from 1 to 1024",
        ),
        (
            "{'model'='/m', 'gpu_memory_utilization'=0.5}",
            "has an invalid setting for /m: gpu_memory_utilization is shared by all models on a GPU",
        ),
        ("'a', {'quantization'='int8'}", "has no model in entry 2: an entry is a path or name, or a table with"),
        ("{'model'=' '}", "has no model in entry 1"),
        ("'a', 'b', ' '", "has no model in entry 3"),
        ("'a', {'model'=7}", "has no model in entry 2"),
    ],
)
def test_an_error_in_the_settings_of_one_model_names_setting_and_model(models: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"^models in .*gatehouse\.toml {words}"):
        load(tmp_path, f"models = [{models}]")


@pytest.mark.parametrize("value", ["5", "true", "{'/m'='int8'}"])
def test_models_in_the_file_must_be_a_list(value: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^models in .*gatehouse\.toml must be a list of paths or names"):
        load(tmp_path, f"models = {value}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "must be a list of paths or names") for text in ("[", '{"model": "a"}')),
        *((text, "has no model in entry 1:") for text in ("[1]", '[["a"]]', ",")),
        ("a,,b", "has no model in entry 2:"),
    ],
)
def test_models_in_the_environment_must_be_comma_separated_or_a_json_list(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"environment GATEHOUSE_MODELS {words}"):
        load(tmp_path, "", {"GATEHOUSE_MODELS": text})


@pytest.mark.parametrize(
    ("file", "environ", "options", "words"),
    [
        ("prot = 5", {}, {}, "unknown setting: prot in .*gatehouse.toml; did you mean 'port'"),
        ("", {"GATEHOUSE_PROT": "5"}, {}, "unknown setting: environment GATEHOUSE_PROT; did you mean 'GATEHOUSE_PORT'"),
        ("", {}, {"prot": 5}, "unknown setting: option prot"),
        ("port = 'many'", {}, {}, "port in .*gatehouse.toml must be a whole number from 0 to 65535"),
        ("port = true", {}, {}, "port .* whole number"),
        ("default_max_tokens = 0", {}, {}, "default_max_tokens in .* must be a whole number from 1 to 10000000"),
        ("default_max_token = 1", {}, {}, "unknown setting: default_max_token in .*toml; did you mean 'default_max_tokens'"),
        ("request_deadline_s = 0.5", {}, {}, "request_deadline_s in .*gatehouse.toml must be .* from 1 to 86400"),
        (f"drain_timeout_s = {'9' * 400}", {}, {}, "drain_timeout_s in .*gatehouse.toml must be a number of seconds"),
        pytest.param(f"port = {'9' * 5000}", {}, {}, "gatehouse.toml is not valid TOML", id="too many digits"),
        pytest.param(f"models = {'[' * 5000}", {}, {}, "gatehouse.toml is not valid TOML", id="too deep"),
        ("", {"GATEHOUSE_PORT": "70000"}, {}, "GATEHOUSE_PORT must be a whole number"),
        ("", {"GATEHOUSE_DEVICE": "tpu"}, {}, "GATEHOUSE_DEVICE must be one of auto, cuda, cpu"),
        ("", {"GATEHOUSE_DATABASE_URL": "mysql://x"}, {}, "GATEHOUSE_DATABASE_URL must begin with"),
        ("", {"GATEHOUSE_DATABASE_URL": "sqlite:///:memory:"}, {}, "GATEHOUSE_DATABASE_URL must name a file"),
        ("", {"GATEHOUSE_SECURE_COOKIES": "maybe"}, {}, "GATEHOUSE_SECURE_COOKIES must be true or false"),
        ("", {"GATEHOUSE_DRAIN_TIMEOUT_S": "nan"}, {}, "GATEHOUSE_DRAIN_TIMEOUT_S must be a number of seconds"),
        ("", {"GATEHOUSE_ADMIN_EMAIL": "alice"}, {}, "GATEHOUSE_ADMIN_EMAIL must be an e-mail address"),
        ("", {"GATEHOUSE_HOST": " "}, {}, "GATEHOUSE_HOST must be a non-empty string"),
        ("models = [1]", {}, {}, "models in .* has no model in entry 1"),
        ("currency = 'EURO'", {}, {}, "currency in"),
        ("data_dir = '/x'", {}, {}, "data_dir cannot be set in"),
        ("port = ", {}, {}, "gatehouse.toml is not valid TOML"),
        (
            "kv_cache_bytes = '4 MB'",
            {},
            {},
            "kv_cache_bytes .* must be from 1048576 to .*, or a whole number with the unit KiB, MiB or GiB",
        ),
        (
            "max_body_bytes = 1",
            {},
            {},
            "max_body_bytes .* must be from 1024 to .*, or a whole number with the unit KiB, MiB or GiB",
        ),
        ("block_size = 24", {}, {}, "block_size .* must be a power of two from 1 to 1024"),
        ("block_size = 2048", {}, {}, "block_size .* must be a power of two from 1 to 1024"),
        ("block_size = 0", {}, {}, "block_size .* must be a power of two from 1 to 1024"),
        ("", {"GATEHOUSE_BLOCK_SIZE": "many"}, {}, "GATEHOUSE_BLOCK_SIZE must be a power of two from 1 to 1024"),
        ("swap_space_gib = -1", {}, {}, "swap_space_gib .* must be a number from 0"),
        ("swap_space_gib = 4097", {}, {}, "swap_space_gib .* must be a number from 0 to 4096"),
        ("gpu_memory_utilization = 90", {}, {}, "gpu_memory_utilization .* must be a number from 0.01 to 1"),
        ("gpu_memory_utilization = 0", {}, {}, "gpu_memory_utilization .* must be a number from 0.01 to 1"),
        ("", {"GATEHOUSE_GPU_MEMORY_UTILIZATION": "nan"}, {}, "UTILIZATION must be a number from 0.01 to 1"),
        ("enable_prefix_caching = 2", {}, {}, "enable_prefix_caching .* must be true or false"),
        ("scheduling_policy = 'random'", {}, {}, "scheduling_policy .* must be one of fair, fcfs"),
        ("inter_token_target_ms = 'soon'", {}, {}, "inter_token_target_ms .* must be a number"),
        ("shared_prefixes = ['/nowhere/a']", {}, {}, "shared_prefixes .* must list existing files; /nowhere/a is not a file"),
        ("shared_prefixes = 5", {}, {}, "shared_prefixes .* must be a list of files"),
        ("speculative = 5", {}, {}, "speculative .* must be off, a JSON object or a table"),
        ("[speculative]\nmethod = 'magic'", {}, {}, "speculative .* requires method to be one of ngram, draft_model"),
        ("[speculative]\nmethod = 'ngram'\ntokens = 4", {}, {}, "speculative .* unknown key: tokens"),
        ("[speculative]\nmethod = 'draft_model'", {}, {}, "speculative .* requires model"),
        (
            "[speculative]\nmethod = 'draft_model'\nmodel = '/nowhere'",
            {},
            {},
            "speculative .* folder as model; /nowhere is not a folder",
        ),
        ("", {"GATEHOUSE_SPECULATIVE": "{"}, {}, "GATEHOUSE_SPECULATIVE must be off or a JSON object"),
        ("", {"GATEHOUSE_SPECULATIVE": '{"method": "ngram", "prompt_lookup_max": 0}'}, {}, "prompt_lookup_max"),
        ("session_idle_s = 600\nsession_absolute_s = 300", {}, {}, "session_idle_s .* is longer"),
    ],
)
def test_an_error_names_its_setting_and_source(
    tmp_path: Path, file: str, environ: dict[str, str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        load(tmp_path, file, environ, **options)


def test_speculative_is_a_table_or_json_or_off(tmp_path: Path) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    table = load(tmp_path, "[speculative]\nmethod = 'ngram'\nnum_speculative_tokens = 4")

    assert table.speculative == load(tmp_path, "", {"GATEHOUSE_SPECULATIVE": text}).speculative == text
    assert load(tmp_path, "speculative = 'off'").speculative is None


@pytest.mark.parametrize("switch", settings.ENGINE_SWITCHES)
def test_a_part_of_the_engine_is_on_unless_it_is_switched_off(tmp_path: Path, switch: str) -> None:
    assert load(tmp_path).switched_off == ()
    assert load(tmp_path, f"{switch} = false").switched_off == (switch,)
    assert load(tmp_path, "", {f"GATEHOUSE_{switch.upper()}": "0"}).switched_off == (switch,)
    assert load(tmp_path, f"{switch} = false", {f"GATEHOUSE_{switch.upper()}": "1"}).switched_off == ()
    with pytest.raises(SettingsError, match=f"GATEHOUSE_{switch.upper()} must be true or false"):
        load(tmp_path, "", {f"GATEHOUSE_{switch.upper()}": ""})


def test_shared_prefixes_are_existing_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("You are helpful.")
    expected = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))

    assert load(tmp_path, f"shared_prefixes = {list(expected)}").shared_prefixes == expected
    assert load(tmp_path, "", {"GATEHOUSE_SHARED_PREFIXES": ",".join(expected)}).shared_prefixes == expected


def test_the_total_length_of_shared_prefix_paths_is_limited(tmp_path: Path) -> None:
    file = tmp_path / ("a" * 250)
    file.write_text("You are helpful.")
    most = 65536 // len(f'"{file}", ')
    assert len(load(tmp_path, shared_prefixes=[str(file)] * most).shared_prefixes) == most
    with pytest.raises(SettingsError, match="shared_prefixes must list files whose paths have at most 65536 characters"):
        load(tmp_path, shared_prefixes=[str(file)] * (most + 1))


@pytest.mark.parametrize("port", ["abc", "70000", "-1", "0"])
def test_an_invalid_database_url_is_reported_without_its_value(tmp_path: Path, port: str) -> None:
    url = f"postgresql://alice:hush-hush@127.0.0.1:{port}/x"
    for refused in ({"database_url": url}, {"environ": {"GATEHOUSE_DATABASE_URL": url}}):
        with pytest.raises(SettingsError, match=r"(?i)database_url must have the form postgresql://USER") as found:
            load(tmp_path, **refused)
        assert "hush" not in str(found.value)


@pytest.mark.parametrize(
    "rest_of_url", ["hush@hush@127.0.0.1:5432/x", "hush:h@hush/hush@127.0.0.1/x", "h@hush?hush@127.0.0.1/x"]
)
def test_an_unescaped_at_sign_in_the_database_password_is_refused(tmp_path: Path, rest_of_url: str) -> None:
    with pytest.raises(SettingsError, match=r"database_url .* write @ in the password as %40") as found:
        load(tmp_path, database_url=f"postgresql://alice:{rest_of_url}")
    assert "hush" not in str(found.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://a:p%40/w@[::1]:5432/x",
        "postgres:///x",
        "postgresql://h/x?sslmode=require",
        "postgresql://a@h/x?application_name=a@b",
    ],
)
def test_every_valid_form_of_database_url_is_accepted(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, database_url=url).database_url == url


def test_a_data_folder_that_is_a_file_is_named_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SettingsError, match=r"option data_dir must be a folder; .*file is a file"):
        load_settings(options={"data_dir": path}, environ={})
    with pytest.raises(SettingsError, match="GATEHOUSE_DATA_DIR must be a folder"):
        load_settings(options={}, environ={"GATEHOUSE_DATA_DIR": str(path)})


def test_an_impossible_data_folder_is_not_reported_as_an_error_of_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_settings(options={"data_dir": tmp_path / "file" / "below"}, environ={}).port == 8000


@pytest.mark.parametrize("key", ["ADMIN_PASSWORD", "ADMIN_TOKEN"])
def test_an_invalid_secret_is_reported_without_its_value(tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingsError, match=f"GATEHOUSE_{key}") as refused:
        load(tmp_path, "", {f"GATEHOUSE_{key}": "hush"})
    assert "hush" not in str(refused.value)


def test_the_repr_contains_no_secret(tmp_path: Path) -> None:
    url = "postgresql://gatehouse:hush-hush@localhost/db"
    found = load(
        tmp_path, "", {"GATEHOUSE_ADMIN_TOKEN": "hush-hush", "GATEHOUSE_ADMIN_PASSWORD": "hush-hush"}, database_url=url
    )
    assert found.admin_token == found.admin_password == "hush-hush"
    assert found.database_url == url
    assert "hush" not in repr(found)


def test_the_variable_of_the_test_suite_is_not_an_unknown_setting(tmp_path: Path) -> None:
    load(tmp_path, "", {"GATEHOUSE_REQUIRE": "postgres,browser"})


def test_every_default_is_accepted_by_its_parser(tmp_path: Path) -> None:
    found = load(tmp_path)
    for key, parser in settings._PARSERS.items():
        value = getattr(found, key)
        if value is not None and value != ():
            assert parser(value) == value


def test_the_default_data_folder_depends_on_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "gatehouse"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_data_dir() == Path.home() / ".local" / "share" / "gatehouse"
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert default_data_dir().parts[-2:] == ("Application Support", "gatehouse")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fe80::1", "http://[fe80::1]:8000"),
        ("gate.example", "http://gate.example:8000"),
    ],
)
def test_the_local_url_of_a_bound_address_is_reachable_on_the_same_machine(host: str, url: str) -> None:
    assert local_url(host, 8000) == url
