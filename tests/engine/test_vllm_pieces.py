"""The adapter's pieces that need no vLLM: environment, transfer parameters, outputs."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector.control import ControlError, HoldInfo
from kvloop.connector.terms import parse_terms
from kvloop.engine.port import DecodeJob, HoldTerms, PrefillJob, ReadGrant, Sources
from kvloop.engine.settings import EngineSettings, resolve
from kvloop.engine.vllm import env, outputs, transfer
from kvloop.engine.vllm.stats import Counters
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2

CPU = resolve(EngineSettings(model="org/name"), has_gpu=False)
CUDA = resolve(EngineSettings(model="org/name"), has_gpu=True)
PLAIN = sampling_pb2.SamplingParams()


def test_the_cpu_environment() -> None:
    made = env.environment(CPU, 5600)
    assert made["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert made["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert made[env.PARENT_PID] == str(os.getpid())
    assert made["OMP_NUM_THREADS"] == "1"
    assert "VLLM_KV_CACHE_LAYOUT" not in made
    assert env.defaults(CPU)["UCX_NET_DEVICES"] == "lo"
    many = CPU.model_copy(update={"tensor_parallel_size": 2})
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env.environment(many, 1)


def test_the_cuda_environment_makes_cross_layer_blocks() -> None:
    made = env.defaults(CUDA)
    assert (made["VLLM_KV_CACHE_LAYOUT"], made["VLLM_USE_V2_MODEL_RUNNER"]) == ("HND", "0")
    assert "UCX_TLS" not in made


@pytest.mark.parametrize(
    ("modules", "nvcc", "off"),
    [
        (set(), True, True),
        ({"flashinfer"}, False, True),
        ({"flashinfer"}, True, False),
        ({"flashinfer", "flashinfer_jit_cache"}, False, False),
    ],
)
def test_a_sampler_that_can_not_be_compiled_is_off(
    modules: set[str], nvcc: bool, off: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: object() if name in modules else None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    if nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    assert (env.defaults(CUDA).get("VLLM_USE_FLASHINFER_SAMPLER") == "0") == off


def test_an_engine_gets_the_gpus_that_it_is_given() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in env.environment(CUDA, 1)
    given = CUDA.model_copy(update={"visible_devices": "2,3"})
    assert env.environment(given, 1)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_only_local_models_go_offline(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" not in env.defaults(CPU)
    local = CPU.model_copy(update={"model": str(tmp_path)})
    assert env.defaults(local)["HF_HUB_OFFLINE"] == "1"


def test_what_the_user_set_stays_unless_it_would_break(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.environment(CPU, 1), *env.defaults(CPU)):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    env.apply(CPU, 1)
    assert os.environ["UCX_TLS"] == "mine"
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("node-7", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert env.is_loopback(host) == loopback


def test_ports() -> None:
    assert env.side_channel_port(CPU.model_copy(update={"nixl_side_channel_port": 7000})) == 7000
    # Not among the ports that outgoing connections get.
    assert 1024 < env.side_channel_port(CPU) < 32_768


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_at_which_somebody_listens_is_refused(host: str) -> None:
    taken = CPU.model_copy(update={"nixl_side_channel_host": host})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        taken = taken.model_copy(update={"nixl_side_channel_port": server.getsockname()[1]})
        with pytest.raises(
            ConfigError, match=f"nixl_side_channel_port: nothing can listen at {host}.*in use"
        ):
            env.side_channel_port(taken)
    assert env.side_channel_port(taken) == taken.nixl_side_channel_port


@pytest.mark.parametrize("port", [0, 7000])
def test_an_address_of_another_host_is_refused(port: int) -> None:
    elsewhere = CPU.model_copy(update={"nixl_side_channel_host": "192.0.2.1", "nixl_side_channel_port": port})
    with pytest.raises(ConfigError, match="an address of this host as nixl_side_channel_host"):
        env.side_channel_port(elsewhere)


def test_prefill_parameters() -> None:
    cold = transfer.prefill(PrefillJob("r1", b"", PLAIN), 45.0)
    assert cold["do_remote_decode"] is True
    assert cold["do_remote_prefill"] is False
    assert cold["remote_block_ids"] is None
    assert cold["kvloop_turn"] == {"id": "r1", "hold": {"ttl_s": 45.0}, "kind": "prefill"}
    terms = parse_terms(cold, "request")
    assert (terms.turn_id, terms.kind, terms.ttl_s) == ("r1", "prefill", 45.0)
    grant = ReadGrant("read", '{"do_remote_decode": true, "unknown": [1]}', 10, 20.0)
    read = transfer.prefill(PrefillJob("r2", b"", PLAIN, read=grant), 45.0)
    assert read["unknown"] == [1]
    assert read["kvloop_turn"] == {"id": "r2", "hold": {"ttl_s": 45.0}, "kind": "prefill"}


@pytest.mark.parametrize(
    ("host", "port", "side_channel", "refused"),
    [
        ("10.0.0.1", 7000, "10.0.0.1:7000", False),
        ("d7.example", 7000, "d7.example:7000", False),
        ("fd00::7", 7000, "[fd00::7]:7000", False),
        ("10.0.0.1", 7000, "", False),
        ("10.0.0.2", 7000, "10.0.0.1:7000", True),
        ("10.0.0.1", 7001, "10.0.0.1:7000", True),
        (None, 7000, "10.0.0.1:7000", True),
        ("10.0.0.1", "7000", "10.0.0.1:7000", True),
    ],
)
def test_handles_that_name_another_place_are_refused(
    host: object, port: object, side_channel: str, refused: bool
) -> None:
    handle = json.dumps({"do_remote_decode": True, "remote_host": host, "remote_port": port})
    job = PrefillJob("r", b"", PLAIN, read=ReadGrant("read", handle, 10, 20.0, side_channel))
    if not refused:
        assert transfer.prefill(job, 45.0)["remote_host"] == host
        return
    with pytest.raises(Failure) as raised:
        transfer.prefill(job, 45.0)
    assert (raised.value.reason_name, raised.value.metadata) == ("KV_READ_FAILED", {"guard": "place"})


def test_decode_parameters() -> None:
    terms = HoldTerms("lease", 60.0, on_cancel=True, tenant="t")
    direct = transfer.decode(DecodeJob("r", b"", PLAIN, hold=terms))
    assert direct == {
        "do_remote_prefill": False,
        "do_remote_decode": False,
        "kvloop_turn": {
            "id": "lease",
            "hold": {"ttl_s": 60.0, "on_cancel": True, "tenant": "t"},
            "kind": "decode",
        },
    }
    handed = transfer.decode(DecodeJob("r", b"", PLAIN, handle_json='{"do_remote_prefill": true, "x": 1}'))
    assert handed["x"] == 1
    assert handed["kvloop_turn"] == {"id": "r", "hold": None, "kind": "decode"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_what_is_no_handle_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(Failure) as caught:
        transfer.decode(DecodeJob("r", b"", PLAIN, handle_json=text))
    assert caught.value.reason == Reason.ERROR_REASON_INVALID_FIELD
    assert caught.value.message == "is not a handle"


def test_a_handle_cannot_name_another_turn() -> None:
    forged = json.dumps({"kvloop_turn": {"id": "other"}})
    assert transfer.decode(DecodeJob("r", b"", PLAIN, handle_json=forged))["kvloop_turn"]["id"] == "r"


def test_the_report_stays_out_of_the_handle() -> None:
    handle, report = outputs.take_report({"a": 1, "kvloop_report": {"local": 2}})
    assert handle == {"a": 1}
    assert report == {"local": 2}
    assert outputs.take_report(None) == (None, None)


def test_sources() -> None:
    assert outputs.sources(None, 7) == Sources(0, 0, 7)
    assert outputs.sources({"local": 1, "external": 2, "computed": 4}, 7) == Sources(1, 2, 4)


def test_a_hold_covers_no_token_that_nobody_saw() -> None:
    info = HoldInfo(
        lease_id="l", kind="decode", num_tokens=10, num_blocks=1, remaining_s=5.0, pins=0, doomed=False
    )
    assert outputs.hold(info).num_tokens == 10
    assert outputs.hold(info, at_most=9).num_tokens == 9
    assert outputs.hold(info, at_most=11).num_tokens == 10


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("not_found", Reason.ERROR_REASON_LEASE_NOT_FOUND),
        ("expired", Reason.ERROR_REASON_LEASE_EXPIRED),
        ("closed", Reason.ERROR_REASON_WORKER_FAILED),
        ("internal", Reason.ERROR_REASON_INTERNAL),
    ],
)
def test_control_errors(code: Any, reason: Any) -> None:
    failure = outputs.control_failure(ControlError(code, "secret"))
    assert failure.reason == reason
    assert "secret" not in failure.message


def logprob(value: float, rank: int | None = None, text: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=text)


def test_the_chosen_token_comes_first() -> None:
    made = outputs.positions([{5: logprob(-0.1, 1, "a"), 9: logprob(-2.0, 7)}], [9])
    assert [candidate.token_id for candidate in made[0].candidates] == [9, 5]
    assert made[0].candidates[0].rank == 7
    assert not made[0].candidates[0].HasField("decoded_token")
    assert made[0].candidates[1].decoded_token == "a"


def test_a_prompts_first_position_has_no_candidates() -> None:
    made = outputs.positions([None, {3: logprob(-1.0, 1)}], [2, 3])
    assert [len(position.candidates) for position in made] == [0, 1]
    assert outputs.positions(None, [1]) == []


def test_counters_add_up() -> None:
    counters = Counters()
    prompt = SimpleNamespace(local_cache_hit=1, external_kv_transfer=2, computed=3)
    step = SimpleNamespace(prompt_token_stats=prompt, num_generation_tokens=4, num_preempted_reqs=1)
    transfers = {"bytes_transferred": [100, 200], "num_descriptors": [3, 4]}
    state = SimpleNamespace(
        num_running_reqs=5, num_waiting_reqs=6, kv_cache_usage=0.5, kv_connector_stats=transfers
    )
    counters.add(state, step)
    counters.add(None, step)
    counters.add(SimpleNamespace(**{**vars(state), "kv_connector_stats": None}), None)
    made = counters.snapshot()
    assert (made.local_tokens, made.external_tokens, made.computed_tokens) == (2, 4, 6)
    assert (made.generated_tokens, made.preemptions) == (8, 2)
    assert (made.transfers, made.transfer_bytes, made.transfer_descriptors) == (2, 300, 7)
    assert (counters.load.running, counters.load.waiting) == (5, 6)
