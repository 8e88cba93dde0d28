"""Settings that contradict are refused with a sentence that says what to change."""

from pathlib import Path
from typing import Any

import pytest

from kvloop.router.settings import RouterSettings
from kvloop.runtime.config import ConfigError

GOOD: dict[str, Any] = {"prefill_endpoints": "127.0.0.1:1", "decode_endpoints": ["127.0.0.1:2", "[::1]:3"]}
SECRET = "0123456789abcdef0123"


def test_endpoints_come_as_text_or_list() -> None:
    settings = RouterSettings.load(flags={**GOOD, "prefill_endpoints": " a:1 , b:2,"})
    assert settings.prefill_endpoints == ("a:1", "b:2")
    assert settings.decode_endpoints == ("127.0.0.1:2", "[::1]:3")


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("prefill_endpoints: [x:9]\nmax_attempts: 3\n")
    monkeypatch.setenv("KVLOOP_PREFILL_ENDPOINTS", "a:1,b:2")
    monkeypatch.setenv("KVLOOP_DECODE_ENDPOINTS", "c:3")
    monkeypatch.setenv("KVLOOP_FLEET_SECRET", SECRET)
    settings = RouterSettings.load(file)
    assert settings.prefill_endpoints == ("a:1", "b:2")
    assert settings.max_attempts == 3
    assert SECRET not in repr(settings)


def test_ways_are_open_and_costs_decide_unless_told_otherwise() -> None:
    settings = RouterSettings.load(flags=GOOD)
    assert (settings.reuse, settings.direct, settings.by_cost) == (True, True, True)
    assert not RouterSettings.load(flags={**GOOD, "reuse": False}).reuse


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prefill_endpoints": ""}, "at least one worker"),
        ({"decode_endpoints": []}, "at least one worker"),
        ({"decode_endpoints": "127.0.0.1:1"}, "can be only one"),
        ({"decode_endpoints": "a:1,a:1"}, "named twice"),
        ({"decode_endpoints": "a:1,[0:0:0:0:0:0:0:1]:2,[::1]:2"}, "named twice"),
        ({"decode_endpoints": "a"}, "expected host:port"),
        ({"decode_endpoints": "a/b:1"}, "host name"),
        ({"decode_endpoints": "a:0"}, "port 0"),
        ({"decode_endpoints": "dns:///a:1"}, "needs brackets"),
        ({"listen": "nowhere"}, "expected host:port"),
        ({"listen": "0.0.0.0:1"}, "set tokens_file, or listen on 127.0.0.1"),
        ({"listen": "[::]:1", "tokens_file": "t"}, "set fleet_secret or fleet_secret_file"),
        ({"fleet_secret": SECRET, "fleet_secret_file": "f"}, "keep one"),
        ({"reuse": False, "kv_recompute_threshold": 1}, "no effect while reuse is off"),
        ({"reuse": False, "direct": True}, "direct has no effect while reuse is off"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"directory_timeout_ms": 0}, "directory_timeout_ms"),
        ({"no_such_name": 1}, "no such setting"),
        ({"prefill_endpoints": "", "decode_endpoints": "", "discover": False}, "at least one worker"),
        ({"prefill_endpoints": "", "decode_endpoints": ""}, "unless directory_url names a store"),
        ({"discover": True, "directory_url": "memory://"}, "memory:// is none"),
    ],
)
def test_contradictions(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        RouterSettings.load(flags={**GOOD, **changes})


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"directory_url": "redis://s:1"}, True),
        (GOOD, False),
        (GOOD | {"discover": True}, True),
        ({"prefill_endpoints": "a:1", "discover": True}, True),
    ],
)
def test_workers_are_looked_for_where_none_are_named(flags: dict[str, Any], found: bool) -> None:
    assert RouterSettings.load(flags=flags).discovers == found


def test_an_open_router_with_tokens_and_secret_is_fine() -> None:
    RouterSettings.load(flags={**GOOD, "listen": "0.0.0.0:7600", "tokens_file": "t", "fleet_secret": SECRET})
