"""`kvloop serve`: where settings come from, what is refused, and that every setting is reachable."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from kvloop.cli import options, serve
from kvloop.cli.main import app
from kvloop.router.settings import RouterSettings
from kvloop.runtime import logs
from kvloop.runtime.config import ConfigError, Settings

Invoke = Callable[..., Result]
LOOPBACK = {"prefill_endpoints": ["127.0.0.1:1"], "decode_endpoints": ["127.0.0.1:2"]}
WORKERS = ("--prefill-endpoints", "127.0.0.1:1", "--decode-endpoints", "127.0.0.1:2")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, no_settings_around: None) -> list[Any]:
    """Collect the settings that would be served."""
    seen: list[Any] = []

    def record(name: str, settings: Any, ready_file: Path | None, log_level: str) -> None:
        seen.append(settings)

    monkeypatch.setattr(serve, "serve", record)
    return seen


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def refused(result: Result) -> str:
    """Return the sentence of a refusal."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


def test_flags_beat_environment_beats_file_beats_defaults(
    served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text(
        "listen: 127.0.0.1:11\ndecoder_kv_blocks_ttl: 100\nkv_recompute_threshold: 10\nblock_size: 64\n"
    )
    monkeypatch.setenv("KVLOOP_DECODER_KV_BLOCKS_TTL", "200")
    monkeypatch.setenv("KVLOOP_KV_RECOMPUTE_THRESHOLD", "20")
    result = invoke("decode", "--config", str(file), "--kv-recompute-threshold", "30")
    assert result.exit_code == 0, result.output
    settings = served[0]
    assert settings.listen == "127.0.0.1:11"
    assert settings.decoder_kv_blocks_ttl == 200
    assert settings.kv_recompute_threshold == 30
    assert settings.block_size == 64
    assert settings.bidirectional_kv_xfer is True


def test_switches_turn_off_and_on(served: list[Any]) -> None:
    assert invoke("prefill", "--no-bidirectional-kv-xfer").exit_code == 0
    assert invoke("prefill", "--bidirectional-kv-xfer").exit_code == 0
    assert [settings.bidirectional_kv_xfer for settings in served] == [False, True]


def test_mappings_are_given_as_yaml(served: list[Any]) -> None:
    result = invoke("prefill", "--adapters", "{sql: /adapters/sql}", "--extra-engine-args", '{"swap": 1}')
    assert result.exit_code == 0, result.output
    assert served[0].adapters == {"sql": "/adapters/sql"}
    assert served[0].extra_engine_args == {"swap": 1}


def test_broken_yaml_of_a_flag_is_a_sentence(served: list[Any]) -> None:
    assert "adapters: not YAML" in refused(invoke("prefill", "--adapters", "{"))
    assert not served


def test_lists_are_repeated_or_separated_by_commas(served: list[Any]) -> None:
    many = ("--prefill-endpoints", "127.0.0.1:1,127.0.0.1:2", "--prefill-endpoints", "127.0.0.1:3")
    result = invoke("router", *many, "--decode-endpoints", "127.0.0.1:4")
    assert result.exit_code == 0, result.output
    assert served[0].prefill_endpoints == ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


@pytest.mark.parametrize("written", ["d:1,d:2", " d:1, d:2,", '["d:1", "d:2"]'])
def test_lists_of_the_environment(written: str, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_DECODE_ENDPOINTS", written)
    assert invoke("prefill").exit_code == 0
    assert invoke("router", "--prefill-endpoints", "p:1").exit_code == 0
    assert [settings.decode_endpoints for settings in served] == [("d:1", "d:2")] * 2
    monkeypatch.setenv("KVLOOP_ADAPTERS", "sql,law")
    assert invoke("gateway").exit_code == 0
    assert served[-1].adapters == ("sql", "law")


def test_numbers_of_the_environment(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_SEED_KV", "1e3,0.5")
    assert invoke("router", *WORKERS).exit_code == 0
    assert served[0].seed_kv == (1000.0, 0.5)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVLOOP_ADAPTERS", "sql", "adapters: KVLOOP_ADAPTERS is not JSON"),
        ("KVLOOP_EXTRA_ENGINE_ARGS", "{", "extra_engine_args: KVLOOP_EXTRA_ENGINE_ARGS is not JSON"),
        ("KVLOOP_DECODE_ENDPOINTS", "[d:1", "decode_endpoints: KVLOOP_DECODE_ENDPOINTS is not JSON"),
        ("KVLOOP_DECODE_ENDPOINTS", "d", "decode_endpoints"),
    ],
)
def test_a_broken_environment_is_a_sentence(
    variable: str, value: str, says: str, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert says in refused(invoke("prefill"))
    assert not served


def test_variables_that_nobody_knows_are_named(
    monkeypatch: pytest.MonkeyPatch, no_settings_around: None
) -> None:
    assert serve.strange_variables("router") == []
    # A worker's, a client's, HAProxy's; and none of anybody's.
    for name in ("HOLD_SHARE", "TOKEN", "LB_LISTEN", "MAX_CONCURENT_TURNS"):
        monkeypatch.setenv(f"KVLOOP_{name}", "5")
    assert serve.strange_variables("router") == ["KVLOOP_MAX_CONCURENT_TURNS"]
    logged = structlog.testing.capture_logs()
    monkeypatch.setattr(logs, "configure", lambda level: None)
    with logged as lines, pytest.raises(ConfigError):
        serve.serve(
            "router",
            RouterSettings.load(flags={"tokens_file": "/nonexistent/tokens", **LOOPBACK}),
            None,
            "info",
        )
    assert [line for line in lines if line["event"] == "unknown_variable"] == [
        {
            "event": "unknown_variable",
            "name": "KVLOOP_MAX_CONCURENT_TURNS",
            "room": "serve",
            "log_level": "warning",
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("router",), "prefill_endpoints"),
        (("router", *WORKERS, "--listen", "0.0.0.0:1"), "tokens_file"),
        (("router", *WORKERS, "--listen", "nonsense"), "host:port"),
        (("router", *WORKERS, "--max-concurrent-turns", "many"), "max_concurrent_turns"),
        (("decode", "--kv-cache-memory-bytes", "9999999", "--gpu-memory-utilization", "0.5"), "set only one"),
        (("decode", "--block-size", "0"), "block_size"),
        (("prefill", "--engine", "imaginary"), "engine"),
        (("prefill", "--no-such-setting", "1"), "--no-such-setting"),
    ],
)
def test_contradictions_and_nonsense_are_refused(
    served: list[Any], arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(invoke(*arguments))
    assert not served


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("blok_size: 16\n", "blok_size: no such setting"),
        ("- a\n- b\n", "expected a mapping"),
        ("{", "config.yaml"),
    ],
)
def test_files_that_make_no_sense_are_refused(
    served: list[Any], tmp_path: Path, content: str, says: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert says in refused(invoke("decode", "--config", str(file)))
    assert not served


def test_a_missing_file_is_refused(served: list[Any], tmp_path: Path) -> None:
    assert "absent.yaml" in refused(invoke("decode", "--config", str(tmp_path / "absent.yaml")))


@pytest.mark.parametrize("role", list(serve.ROLES))
def test_every_setting_is_an_option_with_help(role: str) -> None:
    model = serve.ROLES[role].load_settings()
    text = invoke(role, "--help").output
    for name, field in model.model_fields.items():
        flag = "--" + name.replace("_", "-")
        assert flag in text
        if field.description:
            assert field.description.split()[0] in text


class Inner(BaseModel):
    size: int = 1
    listen: str = "inner"
    kind: Literal["a", "b"] = "a"


class Outer(Settings):
    listen: str = "outer"
    inner: Inner = Inner()


def test_nested_settings_stand_beside_the_others_and_give_way_on_collision() -> None:
    made = options.options_of(Outer)
    assert {option.parameter: option.path for option in made} == {
        "listen": ("listen",),
        "size": ("inner", "size"),
        "inner_listen": ("inner", "listen"),
        "kind": ("inner", "kind"),
    }
    values = options.nest(made, {"size": "2", "inner_listen": "x", "kind": None})
    assert values == {"inner": {"size": "2", "listen": "x"}}


def test_zero_false_and_empty_text_count_as_given() -> None:
    made = options.options_of(Outer)
    assert options.nest(made, {"size": 0, "listen": ""}) == {"inner": {"size": 0}, "listen": ""}


def test_parse_passes_structured_values_through() -> None:
    option = options.SettingOption("adapters", ("adapters",), None, structured=True)
    assert option.parse({"a": 1}) == {"a": 1}
    with pytest.raises(ConfigError, match="adapters"):
        option.parse("{")
