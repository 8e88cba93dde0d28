"""`kvloop chat`, `kvloop leases` and `kvloop reload` against simulated engines, without a terminal."""

import hashlib
import itertools
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

Start = Callable[..., Any]
TOKEN = "sesame"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Place:
    """Where the chats of this module go."""

    router: str
    """Open to everybody on this host."""
    guarded: str
    """Asks for a token."""
    decode: str
    prefill: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("fleet")
    tokens = folder / "tokens"
    tokens.write_text(f"{hashlib.sha256(TOKEN.encode()).hexdigest()} alpha\n")
    reads_back = {"direct": False, "by_cost": False}
    plan = FleetPlan(
        prefill=({"enable_prefix_caching": False},),
        routers=(reads_back, {**reads_back, "tokens_file": str(tokens)}),
        workers={
            "engine": "simulated",
            "block_size": 16,
            "kv_recompute_threshold": 16,
            # 22 ms per token: an answer takes long enough to be cut off.
            "extra_engine_args": {"preset": "qwen3-32b-h200", "eos_every": 100_000},
        },
    )
    async with Fleet(plan, folder / "parts") as fleet:
        first, second = fleet.endpoints("router")
        yield Place(first, second, fleet.endpoint("decode-0"), fleet.endpoint("prefill-0"))


@pytest.fixture
def chat(kvloop: Start, tokenizer_folder: Path) -> Start:
    """Start a chat; the tokenizer is there already."""

    def start(router: str, *arguments: str, stdin: str | None = None) -> Any:
        common = ("chat", "--router", router, "--tokenizer", str(tokenizer_folder), "--temperature", "0")
        return kvloop(*common, *arguments, stdin=stdin)

    return start


def turns_of(text: str) -> list[dict[str, Any]]:
    """Return what the lines after the answers say."""
    pattern = r"^(\w+) \(([\w ]+)\) \| (\d+) prompt tokens: (.*), (\d+) computed \| first token \d+ ms(.*)$"
    return [
        {
            "verdict": found[0],
            "reason": found[1],
            "prompt": int(found[2]),
            "reused": sum(map(int, re.findall(r"\d+", found[3]))),
            "computed": int(found[4]),
            "transfer": found[5],
        }
        for found in re.findall(pattern, text, re.MULTILINE)
    ]


async def test_three_turns_the_later_two_reuse(chat: Start, place: Place) -> None:
    said = "what is the capital of France?\n\nand of Spain?\nand of Italy?\n"
    session = chat(place.router, "--max-tokens", "8", stdin=said)
    assert session.wait() == 0, session.text()
    turns = turns_of(session.text())
    assert [turn["verdict"] for turn in turns] == ["RECOMPUTE", "READBACK", "READBACK"], session.text()
    for before, turn in itertools.pairwise(turns):
        # All of the history but its last token, whose KV nobody has.
        assert turn["reused"] == before["prompt"] + 8 - 1
        assert "MiB in" in turn["transfer"]
    for turn in turns:
        assert turn["reused"] + turn["computed"] == turn["prompt"]


async def test_commands(chat: Start, place: Place) -> None:
    lines = [
        *("/regenerate", "/leases", "/nonsense", "/help"),
        *("hello there, this is the first of the messages", "/regenerate", "/leases"),
        *("/fork", "the fork goes its own way", "/new", "quite another conversation", "/quit", "never said"),
    ]
    session = chat(place.router, "--max-tokens", "6", stdin="\n".join(lines) + "\n")
    assert session.wait() == 0, session.text()
    text = session.text()
    assert "there is no answer yet" in text
    assert "nothing is held" in text
    assert "no command /nonsense; /help lists them" in text
    assert "Ctrl-C ends an answer" in text
    first, again, forked, other = turns_of(text)
    answers = [line for line in text.splitlines() if re.fullmatch(r"([a-z]+ )+", line)]
    assert answers[0] == answers[1]
    assert first["verdict"] == "RECOMPUTE"
    assert again["reused"] == first["prompt"] - 1
    assert forked["verdict"] == "READBACK"
    assert forked["reused"] > first["prompt"]
    assert other["verdict"] == "RECOMPUTE"
    assert re.search(r"^chat-\w+, forked from chat-\w+$", text, re.MULTILINE)
    assert re.search(r"^chat-\w+ +\S+ +\d+ +\d+ s +decode-0$", text, re.MULTILINE)


async def test_leaving_lets_go_of_what_was_held(chat: Start, kvloop: Start, place: Place) -> None:
    session = chat(place.router, "--max-tokens", "6", stdin="a message that leaves a lease behind\n")
    assert session.wait() == 0, session.text()
    listed = kvloop("leases", "--json", "--decode", place.decode)
    assert listed.wait() == 0
    assert json.loads(listed.text()) == {"leases": [], "unreachable": []}


async def test_leases_shows_what_is_held(chat: Start, kvloop: Start, place: Place) -> None:
    session = chat(place.router, "--max-tokens", "6")
    session.process.stdin.write("a message that leaves a lease behind\n")
    session.process.stdin.flush()
    session.wait_for("computed")
    listed = kvloop("leases", "--json", "--decode", place.decode)
    assert listed.wait() == 0
    (lease,) = json.loads(listed.text())["leases"]
    assert lease["state"] == "LIVE"
    assert lease["conversation"].startswith("chat-")
    assert lease["tokens"] > 0
    assert lease["blocks"] == -(-lease["tokens"] // 16)
    assert 0 < lease["time_left_s"] <= 480
    table = kvloop("leases", "--decode", place.decode)
    assert table.wait() == 0
    assert lease["lease"][:8] in table.text()
    session.process.stdin.close()
    assert session.wait() == 0


async def test_what_is_held_is_held_while_the_person_thinks(
    chat: Start, kvloop: Start, tmp_path: Path
) -> None:
    plan = FleetPlan(workers={"engine": "simulated", "decoder_kv_blocks_ttl": 5.5})
    async with Fleet(plan, tmp_path / "parts") as fleet:
        session = chat(fleet.endpoint("router-0"), "--max-tokens", "6")
        session.process.stdin.write("a message that leaves a lease behind\n")
        session.process.stdin.flush()
        session.wait_for("computed")
        begun = time.monotonic()
        # More than its own time: what ends with it is gone by then.
        while time.monotonic() < begun + 11.5:
            listed = kvloop("leases", "--json", "--decode", fleet.endpoint("decode-0"))
            assert listed.wait() == 0
            assert [one["state"] for one in json.loads(listed.text())["leases"]] == ["LIVE"]
        session.process.stdin.close()
        assert session.wait() == 0
        listed = kvloop("leases", "--json", "--decode", fleet.endpoint("decode-0"))
        assert listed.wait() == 0
        assert json.loads(listed.text())["leases"] == []


async def test_ctrl_c_ends_the_answer_and_not_the_chat(chat: Start, place: Place) -> None:
    session = chat(place.router, "--max-tokens", "2000")
    session.process.stdin.write("a long story, please, and take all the time that you need for it\n")
    session.process.stdin.flush()
    session.wait_for(" ")
    session.signal(signal.SIGINT)
    session.wait_for("cancelled")
    # The answer ends there some moments after it ends here.
    asked = 0
    while "decode-0" not in session.text():
        asked += 1
        session.process.stdin.write("/leases\n")
        session.process.stdin.flush()
        session.wait_for_match(rf"decode-0|(nothing is held\n(.*\n)*?){{{asked}}}")
    session.process.stdin.write("go on\n")
    session.process.stdin.flush()
    # The second answer has begun once there are words after the table.
    session.wait_for_match(r"decode-0\n(.*\n)*[a-z]+ [a-z]+ ")
    session.signal(signal.SIGINT)
    session.process.stdin.close()
    assert session.wait() == 0, session.text()
    assert session.text().count("cancelled") == 2
    assert "Traceback" not in session.text()


async def test_wrong_and_right_token(chat: Start, place: Place) -> None:
    for arguments in ((), ("--token", "guess")):
        refused = chat(place.guarded, *arguments, stdin="hello\n")
        assert refused.wait() == 0
        assert "--token" in refused.text()
        assert "Traceback" not in refused.text()
    accepted = chat(place.guarded, "--token", TOKEN, "--max-tokens", "4", stdin="hello\n")
    assert accepted.wait() == 0
    assert len(turns_of(accepted.text())) == 1


async def test_router_that_is_not_there(chat: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    session = chat(endpoint, stdin="hello\n")
    assert session.wait() == 0
    assert f"no router answers at {endpoint}" in session.text()
    assert "Traceback" not in session.text()


async def test_refused_values_name_the_field(chat: Start, place: Place) -> None:
    session = chat(place.router, "--top-p", "7", stdin="hello\n")
    assert session.wait() == 0
    assert "top_p" in session.text()


async def test_no_tokenizer_ends_the_command(kvloop: Start, tmp_path: Path) -> None:
    session = kvloop("chat", "--tokenizer", str(tmp_path), stdin="hello\n")
    assert session.wait() == 1
    assert "--tokenizer" in session.text()
    assert "Traceback" not in session.text()


async def test_reload_lets_leases_go_and_serves_on(chat: Start, kvloop: Start, place: Place) -> None:
    session = chat(place.router, "--max-tokens", "6")
    session.process.stdin.write("a message that leaves a lease behind\n")
    session.process.stdin.flush()
    session.wait_for("computed")
    reloaded = kvloop("reload", "two", "--prefill", place.prefill, "--decode", place.decode)
    assert reloaded.wait() == 0, reloaded.text()
    assert reloaded.text().count("epoch ") == 2
    listed = kvloop("leases", "--json", "--decode", place.decode)
    assert listed.wait() == 0
    assert json.loads(listed.text())["leases"] == []
    nobody = kvloop("reload", "three", "--prefill", "127.0.0.1:1", "--decode", place.decode)
    assert nobody.wait() != 0
    assert "127.0.0.1:1" in nobody.text()
    again = kvloop("reload", "three", "--prefill", place.prefill, "--decode", place.decode)
    assert again.wait() == 0, again.text()
    session.process.stdin.write("and another\n")
    session.process.stdin.close()
    assert session.wait() == 0, session.text()
