"""Growing conversations on real engines: kvloop, a proxy and the floor in turns, on the same prompts.

Every leg plays every turn of every conversation, one after the other, in changing order, and goes on from its
own answer: greedy answers are the same everywhere, and the record shows it. A shadow is sent what the first
leg was sent and keeps nothing: what P takes to compute the whole prompt. A leg that fails is left out from
there on, with the reason.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvloop.bench.peers_http import COMPLETIONS, Line, reading
from kvloop.bench.records import digest
from kvloop.bench.router_traffic import TurnLost
from kvloop.bench.statistics import bounds, median
from kvloop.bench.target import Outcome, Request, TargetFailed
from kvloop.bench.workload.model import Encoder, History, Step
from kvloop.bench.workload.words import rng_of, words

_TIMEOUT_S = 300.0
_EVENT = b"data: "
Send = Callable[[Request], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Leg:
    """One place that turns are sent to."""

    send: Send
    shadow: bool = False
    verdict: str = ""
    """What the turns after the first are to be; empty where nobody tells."""


@dataclass(frozen=True, slots=True)
class RealPlan:
    """What conversations are like, in tokens."""

    conversations: int = 3
    turns: int = 6
    opening: int = 512
    input: int = 128
    output: int = 16
    seed: int = 0
    limit_s: float = 240.0
    """No further conversation begins after so many seconds."""

    @property
    def longest(self) -> int:
        """Return the tokens of the last turn, answer included."""
        return self.opening + self.turns * (self.input + self.output)


@dataclass(frozen=True, slots=True)
class RealTurn:
    """One turn of one leg."""

    leg: str
    conversation: int
    turn: int
    """From 1."""
    prompt_tokens: int
    ttft_ms: float
    latency_ms: float
    verdict: str
    prompt_digest: str
    answer_digest: str


@dataclass(slots=True)
class Real:
    """Plays a plan."""

    plan: RealPlan
    legs: dict[str, Leg]
    encoder: Encoder
    kept: Callable[[], object] = lambda: None
    """Called when a conversation was played."""
    lost: dict[str, str] = field(default_factory=dict)
    turns: list[RealTurn] = field(default_factory=list)

    async def play(self) -> None:
        """Play all conversations; one of two turns warms up."""
        until = time.monotonic() + self.plan.limit_s
        await self._conversation(-1, 2)
        for number in range(self.plan.conversations):
            if number and time.monotonic() > until:
                break
            await self._conversation(number, self.plan.turns)
            self.kept()

    async def _conversation(self, number: int, turns: int) -> None:
        plan, rng = self.plan, rng_of(self.plan.seed, "peers", number)
        opening = words(rng, plan.opening)
        histories = {
            name: History.open(self.encoder, opening) for name, leg in self.legs.items() if not leg.shadow
        }
        run = secrets.token_hex(6)
        order = list(self.legs)
        for turn in range(1, turns + 1):
            step = Step(words(rng, plan.input), plan.output)
            prompts = {name: history.ask(step) for name, history in histories.items() if name in self.legs}
            for name in [name for name in order if name in self.legs]:
                prompt = prompts.get(name) or next(iter(prompts.values()), None)
                if prompt is None:
                    return
                outcome = await self._turn(name, prompt, f"{run}-{name}", number, turn)
                if outcome is not None and name in histories:
                    histories[name].answered(outcome.token_ids)
            order = [*order[1:], order[0]]

    async def _turn(self, name: str, prompt: list[int], told: str, number: int, turn: int) -> Outcome | None:
        leg = self.legs[name]
        # Nothing that one leg leaves in an engine's prefix cache may serve another.
        salt = secrets.token_hex(6) if leg.shadow else told
        request = Request(prompt, self.plan.output, told, cache_salt=salt)
        try:
            outcome = await leg.send(request)
        except (TargetFailed, TurnLost, OSError, ValueError, KeyError) as error:
            self.lost[name] = f"turn {turn}: {type(error).__name__}: {error}"
            del self.legs[name]
            return None
        if number >= 0:
            self.turns.append(
                RealTurn(
                    name,
                    number,
                    turn,
                    len(prompt),
                    round(outcome.ttft_ms, 3),
                    round(outcome.latency_ms, 3),
                    outcome.verdict,
                    digest(prompt),
                    digest(outcome.token_ids) if not leg.shadow else "",
                )
            )
        return outcome


class BareEngines:
    """P and D of `vllm serve`, called by the client itself."""

    def __init__(self, prefill: str, decode: str, model: str) -> None:
        self._prefill, self._decode = Line(prefill, _TIMEOUT_S), Line(decode, _TIMEOUT_S)
        self._model = model
        self._handles: dict[str, dict[str, Any]] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._prefill.close()
        await self._decode.close()

    async def send(self, request: Request) -> Outcome:
        """Send a turn to P, then to D, with D's handle of the turn before. Raises TurnLost, OSError."""
        begun = time.perf_counter()
        told = reading(self._handles.pop(request.conversation_id, None))
        short = {**self._body(request), "max_tokens": 1, "kv_transfer_params": told}
        prefilled = await self._prefill.ask("POST", COMPLETIONS, json.dumps(short).encode())
        handle = json.loads(prefilled.content)["kv_transfer_params"]
        whole = {**self._body(request), "stream": True, "kv_transfer_params": handle}
        answer = await self._decode.ask("POST", COMPLETIONS, json.dumps(whole).encode())
        latency_s = time.perf_counter() - begun
        ids: list[int] = []
        for event in events_of(answer.content):
            for choice in event.get("choices") or ():
                ids += choice.get("token_ids") or ()
            if event.get("kv_transfer_params"):
                self._handles[request.conversation_id] = event["kv_transfer_params"]
        if not ids:
            raise TurnLost("D gave no answer")
        return _outcome(request, ids, answer.first_event_s - begun, latency_s)

    async def prefill(self, request: Request) -> Outcome:
        """Have P alone compute a prompt and one token. Raises TurnLost, OSError."""
        body = {**self._body(request), "max_tokens": 1}
        begun = time.perf_counter()
        answer = await self._prefill.ask("POST", COMPLETIONS, json.dumps(body).encode())
        took_s = time.perf_counter() - begun
        ids = json.loads(answer.content)["choices"][0]["token_ids"]
        return _outcome(request, ids, took_s, took_s)

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": request.exact,
            "return_token_ids": True,
            "cache_salt": request.cache_salt,
        }


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Raises ValueError for one that is no JSON, TurnLost for an error."""
    events = []
    for line in content.split(b"\n"):
        if line.startswith(_EVENT) and not line.endswith(b"[DONE]"):
            event = json.loads(line.removeprefix(_EVENT))
            if "error" in event:
                raise TurnLost("a stream ended with an error")
            events.append(event)
    return events


def _outcome(request: Request, ids: list[int], ttft_s: float, latency_s: float) -> Outcome:
    return Outcome(ids, ttft_s * 1e3, latency_s * 1e3, len(request.prompt), len(ids))


def summarise(turns: Sequence[RealTurn], reference: str) -> dict[str, dict[str, Any]]:
    """Return by leg: TTFT turn by turn, and over the turns after the first, also against a leg.

    How many times the reference's it takes is the median over turns, each against the reference's same turn:
    turns grow, so that medians of all would compare unlike ones.
    """
    record: dict[str, dict[str, Any]] = {}
    later: dict[str, dict[tuple[int, int], float]] = {}
    for turn in turns:
        if turn.turn > 1:
            later.setdefault(turn.leg, {})[turn.conversation, turn.turn] = turn.ttft_ms
    for name in dict.fromkeys(turn.leg for turn in turns):
        mine = [turn for turn in turns if turn.leg == name]
        by_turn: dict[str, Any] = {}
        for number in sorted({turn.turn for turn in mine}):
            these = [turn for turn in mine if turn.turn == number]
            by_turn[str(number)] = {
                "prompt_tokens": these[0].prompt_tokens,
                "ttft_ms": median([turn.ttft_ms for turn in these]).as_dict(),
            }
        record[name] = {"samples": len(mine), "turns": by_turn}
        if name in later:
            record[name]["later_turns_ttft_ms"] = median(list(later[name].values())).as_dict()
            theirs = later.get(reference, {}) if name != reference else {}
            if both := [ttft / theirs[place] for place, ttft in later[name].items() if place in theirs]:
                record[name][f"times_{reference}"] = median(both).as_dict()
        if any(turn.verdict for turn in mine):
            told = Counter(turn.verdict for turn in mine if turn.turn > 1)
            record[name]["later_verdicts"] = dict(sorted(told.items()))
    return record


def identical(turns: Sequence[RealTurn]) -> dict[str, int]:
    """Return how many turns there were, and in how many all legs had the same prompt and the same answer."""
    places: dict[tuple[int, int], list[RealTurn]] = {}
    for turn in turns:
        places.setdefault((turn.conversation, turn.turn), []).append(turn)
    return {
        "turns": len(places),
        "same_prompt": sum(len({turn.prompt_digest for turn in these}) == 1 for these in places.values()),
        "same_answer": sum(
            len({turn.answer_digest for turn in these if turn.answer_digest}) <= 1
            for these in places.values()
        ),
    }


def ttft_lines(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the TTFT of the turns after the first, for people."""
    rows = []
    for name, peer in peers.items():
        later = (peer.get("real") or {}).get("later_turns_ttft_ms")
        if later:
            times = [_times(value) for key, value in peer["real"].items() if key.startswith("times_")]
            rows.append(f"{name}: {later['value']:,.0f} ms" + "".join(times))
    return ["TTFT of later turns on real vLLM, median", *rows] if rows else []


def _times(found: Mapping[str, Any]) -> str:
    within = bounds(found)
    return f", {found['value']:.2f} times ours" + (f" ({within[0]:.2f} to {within[1]:.2f})" if within else "")


def as_records(turns: Sequence[RealTurn]) -> list[dict[str, Any]]:
    """Return the turns as JSON has them."""
    return [asdict(turn) for turn in turns]
