"""The README's example of a chat, as a newcomer would run it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

README = Path(__file__).parents[2] / "README.md"
USUAL = "http://127.0.0.1:8000"


def test_curl(gateway: Gateway, router: FakeRouter) -> None:
    (example,) = re.findall(r"^```\n(curl .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert example.count("\n") < 12
    assert USUAL in example
    router.scripts.append(router.say("Paris.", readback=7))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.replace("curl ", "curl -sS ").replace(USUAL, gateway.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"] == "Paris."
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert router.turns[0].request.conversation_id == "agent-1"
