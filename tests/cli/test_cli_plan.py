"""What `kvloop up` makes of its options."""

from pathlib import Path
from typing import Any

import pytest

from kvloop.cli.up import plan_of

OWN = (
    *("prefill", "decode", "routers", "listen", "gateways", "gateway_listen", "chat_listen", "store"),
    *("prefix_caching_on_prefill", "prefill_config", "decode_config", "router_config", "gateway_config"),
)
SIMULATED = {"engine": "simulated"}


def plan(engine: dict[str, Any], **own: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of every part."""
    made: dict[str, dict[str, Any]] = plan_of(engine, {**dict.fromkeys(OWN), **own}).settings()
    return made


def test_a_gateway_knows_what_its_engines_serve() -> None:
    tokenized = {**SIMULATED, "extra_engine_args": {"tokenizer": "/models/x"}, "max_model_len": 4096}
    parts = plan({**tokenized, "served_model_name": "m", "adapters": {"poet": "/adapters/poet"}})
    assert list(parts) == ["prefill-0", "decode-0", "router-0", "gateway-0"]
    assert parts["gateway-0"] == {
        "listen": "127.0.0.1:8000",
        "chat_listen": "127.0.0.1:7700",
        "model": "/models/x",
        "served_model_name": "m",
        "adapters": ["poet"],
        "max_model_len": 4096,
    }


def test_engines_without_a_tokenizer_have_no_gateway_unless_asked_for() -> None:
    assert "gateway-0" not in plan(SIMULATED)
    assert "gateway-1" in plan(SIMULATED, gateways=2)
    assert "gateway-0" not in plan({**SIMULATED, "extra_engine_args": {"tokenizer": "/m"}}, gateways=0)


def test_only_the_first_of_several_is_where_it_is_looked_for() -> None:
    parts = plan(SIMULATED, routers=2, gateways=2, listen="127.0.0.1:1")
    assert parts["router-0"] == {"listen": "127.0.0.1:1"}
    assert parts["router-1"] == {}
    assert parts["gateway-0"]["listen"] == "127.0.0.1:8000"
    assert not {"listen", "chat_listen"} & parts["gateway-1"].keys()


@pytest.mark.parametrize(("given", "place"), [(None, "127.0.0.1:5"), ("127.0.0.1:6", "127.0.0.1:6")])
def test_an_option_stands_above_the_file(tmp_path: Path, given: str | None, place: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("listen: 127.0.0.1:5\nreasoning_parser: qwen3\n")
    parts = plan(SIMULATED, gateways=1, gateway_config=file, gateway_listen=given)
    assert parts["gateway-0"]["listen"] == place
    assert parts["gateway-0"]["reasoning_parser"] == "qwen3"
