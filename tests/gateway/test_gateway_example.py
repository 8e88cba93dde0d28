"""The example agent on the gateway, as a process: tools are called, and the history comes back whole."""

import subprocess
import sys
from pathlib import Path

import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

AGENT = Path(__file__).parents[2] / "examples" / "agent_openai.py"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_an_agent_with_tools(gateway: Gateway, router: FakeRouter) -> None:
    router.scripts += [
        router.say(call("look_into", '{"crate": "A12"}')),
        router.say(call("add", '{"numbers": [40, "two"]}'), readback=30),
        router.say(call("add", '{"numbers": [40, 2]}'), readback=40),
        router.say("There are 42.", readback=50),
    ]
    ended = subprocess.run(
        [sys.executable, AGENT, "How many?", "--url", f"{gateway.url}/v1", "--token", "t"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == "There are 42.\n"
    assert [line.split(" of ")[0] for line in ended.stderr.splitlines()] == [
        "turn 1: 0",
        "turn 2: 30",
        "turn 3: 40",
        "turn 4: 50",
    ]
    requests = [turn.request for turn in router.turns]
    assert len(requests) == 4
    assert len({request.conversation_id for request in requests}) == 1
    assert requests[0].conversation_id.startswith("agent-")
    assert router.turns[0].metadata["authorization"] == "Bearer t"
    assert '"copper valves": 40' in router.prompt(1)
    assert "TypeError" in router.prompt(2)
    assert router.prompt(3).rstrip().endswith("<|im_start|>assistant")
    assert "42" in router.prompt(3)
