"""What is vLLM's alone: bad constraints that must not harm the engine core, its death, and its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_pair import Pair, greedy, until, words
from engine_settings import vllm_settings

from kvloop.engine.port import DecodeJob
from kvloop.engine.settings import EngineSettings
from kvloop.engine.vllm.adapter import VllmEngine
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    """One decode engine."""
    engine = VllmEngine(vllm_settings(), "decode")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await engine.start()
        yield engine
    finally:
        await engine.stop()


async def say(engine: VllmEngine, sampling: sampling_pb2.SamplingParams, prompt: list[int]) -> str:
    text = ""
    job = DecodeJob(f"d{os.urandom(4).hex()}", tokens.pack(prompt), sampling)
    async for delta in engine.decode(job):
        text += delta.text
    return text


def constrained(
    temperature: float = 0.0, max_tokens: int = 24, **constraint: Any
) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=max_tokens,
        structured_outputs=sampling_pb2.StructuredOutputs(**constraint),
    )


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"string"}' + "}" * depth


BAD = [
    {"json_schema": "{"},
    {"json_schema": "[1]"},
    {"json_schema": '{"type": "nonsense"}'},
    {"json_schema": '{"$ref": "#/nowhere"}'},
    {"json_schema": '{"$ref": "#"}'},
    {"json_schema": '{"type": "string", "pattern": "("}'},
    {"json_schema": '{"type": "integer", "minimum": 5, "maximum": 1}'},
    {"json_schema": '{"type": "array", "uniqueItems": true}'},
    {"json_schema": '{"type": "array", "minItems": 1000000000000}'},
    {"json_schema": nested(5000)},
    {"regex": "("},
    {"regex": r"(a)\1"},
    {"regex": "a\x00"},
    {"regex": "(" * 10_000 + ")" * 10_000},
    {"grammar": "root ::= nothing"},
    {"grammar": 'other ::= "a"'},
    {"grammar": " "},
    {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    {"structural_tag": "3"},
    {"structural_tag": '{"type": "x"}'},
    {"choice": sampling_pb2.Choices()},
    {"json_object": False},
]


@pytest.mark.parametrize("constraint", BAD, ids=range(len(BAD)))
async def test_bad_constraints_are_refused(engine: VllmEngine, constraint: dict[str, Any]) -> None:
    with pytest.raises(Failure) as caught:
        await say(engine, constrained(**constraint), words(20))
    assert caught.value.reason == Reason.ERROR_REASON_INVALID_FIELD
    assert (caught.value.field or "").startswith("sampling.structured_outputs")
    await engine.check_health()


HARD = [
    {"grammar": "root ::= root"},
    {"grammar": 'root ::= "a" dead\ndead ::= dead'},
    {"grammar": 'root ::= root "a" | "b"'},
    {"grammar": 'root ::= ""'},
    {"regex": "a{1,1000000000}"},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(a*)*"},
    {"json_schema": json.dumps({"type": "string", "minLength": 1_000_000_000})},
    {"json_schema": "{}"},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constraint", HARD, ids=range(len(HARD)))
async def test_hard_constraints_do_no_harm(
    engine: VllmEngine, constraint: dict[str, Any], temperature: float
) -> None:
    """Whether they are answered or refused, the engine core lives and others are served."""
    try:
        await say(engine, constrained(temperature, **constraint), words(20))
    except Failure as failure:
        assert failure.code.name == "INVALID_ARGUMENT"  # noqa: PT017 - either outcome is right
    await engine.check_health()
    assert await say(engine, greedy(4), words(20))


async def test_constraints_hold(engine: VllmEngine) -> None:
    prompt = words(20)
    assert await say(engine, constrained(regex="[ab]{4}"), prompt) in {
        f"{a}{b}{c}{d}" for a in "ab" for b in "ab" for c in "ab" for d in "ab"
    }
    choices = sampling_pb2.Choices(values=["left", "right"])
    assert await say(engine, constrained(choice=choices), prompt) in choices.values
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    tight = await say(
        engine,
        constrained(json_schema=json.dumps(schema), disable_any_whitespace=True, max_tokens=60),
        prompt,
    )
    assert json.loads(tight).keys() == {"a", "b"}
    assert tight == json.dumps(json.loads(tight), separators=(",", ":"))


EVERY = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "seed": -5,
    "stop": ["zzzz"],
    "stop_token_ids": [17],
    "bad_words": ["the"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 5,
    "prompt_logprobs": 1,
    "logprob_token_ids": [5, 6],
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "logit_bias": {5: 100.0, 6: -100.0},
    "allowed_token_ids": [100, 200, 300],
    "extra_args_json": '{"anything": [1, {"goes": null}]}',
}


@pytest.mark.parametrize("name", EVERY)
async def test_every_parameter_is_served(engine: VllmEngine, name: str) -> None:
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 4, name: EVERY[name]})
    await say(engine, sampling, words(20))
    await engine.check_health()


async def test_all_parameters_together_are_served(engine: VllmEngine) -> None:
    some = {
        key: value
        for key, value in EVERY.items()
        if key not in {"detokenize", "logprob_token_ids", "allowed_token_ids"}
    }
    await say(engine, sampling_pb2.SamplingParams(**{**some, "max_tokens": 6}), words(20))
    await engine.check_health()


async def test_nothing_left_to_sample_does_no_harm(engine: VllmEngine) -> None:
    for temperature in (0.0, 1.0):
        sampling = sampling_pb2.SamplingParams(
            temperature=temperature, max_tokens=3, allowed_token_ids=[100], logit_bias={100: -100.0}
        )
        await say(engine, sampling, words(20))
    await engine.check_health()
    assert await say(engine, greedy(4), words(20))


async def test_a_thinking_budget_without_a_reasoning_model_is_named(engine: VllmEngine) -> None:
    with pytest.raises(Failure) as caught:
        await say(engine, sampling_pb2.SamplingParams(max_tokens=2, thinking_token_budget=5), words(20))
    assert caught.value.field == "sampling.thinking_token_budget"


async def test_a_repeating_answer_is_ended(engine: VllmEngine) -> None:
    sampling = greedy(200, allowed_token_ids=[100])
    sampling.repetition_detection.max_pattern_size = 2
    sampling.repetition_detection.min_count = 5
    finish = None
    count = 0
    async for delta in engine.decode(DecodeJob("repeating", tokens.pack(words(20)), sampling)):
        count += len(delta.token_ids)
        finish = delta.finish or finish
    assert finish is not None
    assert count < 200


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_the_core_dies_and_that_is_told() -> None:
    engine = VllmEngine(vllm_settings(), "decode")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await engine.start()
        (pid,) = engine.core_pids
        folder = engine.control_path.parent
        assert folder.is_dir()
        turn = asyncio.create_task(say(engine, greedy(900), words(20)))
        await until(lambda: engine.load.running > 0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Failure) as caught:
            await turn
        assert caught.value.reason == Reason.ERROR_REASON_WORKER_FAILED
        for call in (engine.check_health(), engine.pool(), say(engine, greedy(1), words(5))):
            with pytest.raises(Failure) as caught:
                await call
            assert caught.value.reason == Reason.ERROR_REASON_WORKER_FAILED
    finally:
        await engine.stop()
    await engine.stop()
    assert gone(pid)
    assert not folder.exists()


async def test_stop_ends_turns_and_leaves_nothing() -> None:
    engine = VllmEngine(vllm_settings(), "decode")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await engine.start()
        (pid,) = engine.core_pids
        folder = engine.control_path.parent
        turn = asyncio.create_task(say(engine, greedy(900), words(20)))
        await until(lambda: engine.load.running > 0)
    finally:
        await engine.stop()
    with pytest.raises(Failure) as caught:
        await turn
    assert caught.value.reason == Reason.ERROR_REASON_WORKER_FAILED
    assert gone(pid)
    assert not folder.exists()


async def test_a_cancelled_start_leaves_nothing() -> None:
    engine = VllmEngine(vllm_settings(), "prefill")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = asyncio.create_task(engine.start())
        await until(lambda: bool(engine.core_pids) or start.done())
        (pid,) = engine.core_pids
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert gone(pid)
    assert not engine.core_pids


FRONT_END = """
import asyncio, sys
from kvloop.engine.settings import EngineSettings
from kvloop.engine.vllm.adapter import VllmEngine

async def main():
    engine = VllmEngine(EngineSettings.model_validate_json(sys.argv[1]), "decode")
    await engine.start()
    print("core", engine.core_pids[0], flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_the_core_dies_with_its_front_end(tmp_path: Path) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(FRONT_END)
    command = [sys.executable, str(script), vllm_settings().model_dump_json()]
    front_end = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert front_end.stdout is not None
        line = b""
        while not line.startswith(b"core "):  # libraries may print too
            line = await front_end.stdout.readline()
            assert line
        pid = int(line.split()[1])
        assert not gone(pid)
    finally:
        front_end.kill()
        await front_end.wait()
    await until(lambda: gone(pid))


async def test_a_missing_checkpoint_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="kvloop model fetch smollm2"):
        VllmEngine(EngineSettings(), "decode")


async def test_a_model_that_is_not_there_fails_to_start(tmp_path: Path) -> None:
    engine = VllmEngine(vllm_settings(model=str(tmp_path)), "decode")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Failure) as caught:
            await engine.start()
    assert caught.value.reason == Reason.ERROR_REASON_WORKER_FAILED
    await engine.stop()


async def test_without_bidirectional_reads_a_grant_is_refused(engine: VllmEngine) -> None:
    """Such an engine would wait for the read for ever."""
    from kvloop.engine.port import ReadGrant

    closed = VllmEngine(vllm_settings(bidirectional_kv_xfer=False), "prefill")
    with pytest.raises(Failure) as caught:
        await Pair(closed, engine).prefill(words(20), read=ReadGrant("r", "{}", 5, 1.0))
    assert caught.value.reason == Reason.ERROR_REASON_INCOMPATIBLE_ENGINES


async def test_engines_of_other_layouts_are_not_paired(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvloop.engine.vllm import facts

    assert engine._core is not None
    config = engine._core.llm.vllm_config

    def digest() -> str:
        return facts.compatibility(engine._settings, config, engine.facts.version, {})

    assert digest() == engine.facts.compatibility
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    assert digest() != engine.facts.compatibility
