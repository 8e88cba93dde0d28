"""Clients that nobody here wrote, against a deployment as `kvloop up` starts it.

Each has a conversation under the identity that it sends by itself, and no change but the base URL.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import fetch
import openai
import pytest
from client_go import Go
from surface_kit import MODEL, QUESTIONS, REUSED, SYSTEM, Told, Up, run

from kvloop.bench.workload.words import words
from kvloop.engine.settings import smollm2_dir

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
Clients = dict[str, Told]
Message = dict[str, Any]


def converse(told: Told, ask: Callable[[int, list[Message]], tuple[str, str]]) -> None:
    """Play one conversation; ask returns an answer's text and its verdict."""
    messages: list[Message] = []
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        try:
            text, verdict = ask(number, messages)
        except (openai.OpenAIError, anthropic.AnthropicError) as error:
            told.requests += 1
            told.errors.append(f"{type(error).__name__}: {error}")
            return
        assert text
        messages.append({"role": "assistant", "content": text})
        told.turn(number, verdict)


def check(told: Told) -> None:
    assert not told.errors
    assert told.later_turns
    assert told.share >= 0.8


def test_openai_python(up: Up, clients: Clients) -> None:
    told = clients["openai-python"] = Told()
    system = [{"role": "system", "content": SYSTEM}]
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        create: Any = client.chat.completions.create
        raw: Any = client.chat.completions.with_raw_response.create
        responses: Any = client.responses.with_raw_response.create

        def whole(number: int, messages: list[Message]) -> tuple[str, str]:
            answer = raw(
                model=MODEL,
                messages=system + messages,
                max_tokens=24,
                temperature=0,
                extra_body={"conversation_id": "openai-python-whole"},
            )
            return answer.parse().choices[0].message.content, answer.headers["x-kvloop-verdict"]

        def streamed(number: int, messages: list[Message]) -> tuple[str, str]:
            text, verdict = "", ""
            for chunk in create(
                model=MODEL,
                messages=system + messages,
                max_tokens=24,
                temperature=0,
                stream=True,
                extra_headers={"X-Session-ID": "openai-python-streamed"},
            ):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                verdict = (chunk.model_extra or {}).get("kvloop", {}).get("verdict", verdict)
            return text, verdict

        def by_responses(number: int, messages: list[Message]) -> tuple[str, str]:
            answer = responses(
                model=MODEL,
                instructions=SYSTEM,
                input=messages,
                max_output_tokens=24,
                temperature=0,
                extra_headers={"session-id": "openai-python-responses"},
            )
            return answer.parse().output_text, answer.headers["x-kvloop-verdict"]

        for ask in (whole, streamed, by_responses):
            converse(told, ask)
        assert [model.id for model in client.models.list()] == [MODEL]
    check(told)


def test_anthropic_python(up: Up, clients: Clients) -> None:
    told = clients["anthropic-python"] = Told()
    with anthropic.Anthropic(base_url=up.url, api_key="none", max_retries=0, timeout=120) as client:
        create: Any = client.messages.with_raw_response.create
        stream: Any = client.messages.stream

        def whole(number: int, messages: list[Message]) -> tuple[str, str]:
            answer = create(
                model=MODEL,
                system=SYSTEM,
                messages=messages,
                max_tokens=24,
                extra_body={"temperature": 0},
                extra_headers={"x-claude-code-session-id": "anthropic-whole"},
            )
            return answer.parse().content[0].text, answer.headers["x-kvloop-verdict"]

        def streamed(number: int, messages: list[Message]) -> tuple[str, str]:
            with stream(
                model=MODEL,
                system=SYSTEM,
                messages=messages,
                max_tokens=24,
                extra_body={"temperature": 0},
                extra_headers={"x-claude-code-session-id": "anthropic-streamed"},
            ) as events:
                answer = events.get_final_message()
            # The SDK knows no field of ours, but it knows cached tokens.
            return answer.content[0].text, "readback" if answer.usage.cache_read_input_tokens else "recompute"

        for ask in (whole, streamed):
            converse(told, ask)
    check(told)


def test_openai_js(up: Up, clients: Clients) -> None:
    told = clients["openai-js"] = Told()
    folder = fetch.openai_js()
    # Node looks for packages beside the program.
    program = folder / "chat.mjs"
    program.write_bytes((HERE / "chat.mjs").read_bytes())
    given = {"system": SYSTEM, "questions": QUESTIONS, "session": "openai-js"}
    printed = json.loads(run(["node", str(program), f"{up.url}/v1", MODEL, json.dumps(given)], cwd=folder))
    for number, turn in enumerate(printed["turns"]):
        told.turn(number, turn["verdict"])
        assert turn["identity"] == "x-session-id"
    told.requests += len(printed["errors"])
    told.errors += printed["errors"]
    check(told)


def test_go(up: Up, clients: Clients, tmp_path: Path) -> None:
    told = clients["go"] = Told()
    go = Go(tmp_path / "gopath")
    agent = tmp_path / "agent"
    go.run("go", "build", "-o", str(agent), "./examples/agent")
    printed = go.run(str(agent), "-routers", up.router, "-turns", "4", "-conversation", "go")
    turns = re.findall(r"turn (\d+): (\w+), (\d+) of", printed)
    assert len(turns) == 4, printed
    for number, verdict, reused in turns:
        told.turn(int(number) - 1, verdict.lower() if int(reused) else "recompute")
    check(told)


def test_vllms_multi_turn_benchmark(up: Up, clients: Clients, tmp_path: Path) -> None:
    told = clients["vllm-multi-turn-benchmark"] = Told()
    folder = fetch.multi_turn_benchmark()
    (tmp_path / "text.txt").write_text(words(random.Random(0), 60_000))
    workload = tmp_path / "workload.json"
    workload.write_text((HERE / "multi_turn.json").read_text())
    before = up.turns()
    program = [sys.executable, str(folder / "benchmark_serving_multi_turn.py")]
    program += ["--model", str(smollm2_dir()), "--served-model-name", MODEL, "--url", up.url]
    program += ["--input-file", str(workload), "--num-clients", "2", "--max-active-conversations", "4"]
    printed = run([*program, "--send-conversation-id", "--no-early-stop", "--verbose"], cwd=tmp_path)
    after = up.turns()

    # Its statistics may lack the last turns, its log does not. It counts messages: 1, 3, 5, ...
    places = [int(number) for number in re.findall(r"using conversation ID \S+ \(turn: (\d+)", printed)]
    failures = sum(map(int, re.findall(r"num_failures=(\d+)", printed)))
    told.requests = len(places)
    told.errors += ["a request failed"] * failures
    told.later_turns = sum(1 for place in places if place > 1)
    told.reused = sum(after.get(verdict, 0) - before.get(verdict, 0) for verdict in REUSED)
    # What first turns have in common is too short to be reused, so these are later ones all.
    assert told.reused <= told.later_turns
    assert sum(after.values()) - sum(before.values()) == len(places)
    assert told.later_turns > 12
    check(told)
