"""One agent's conversation over HTTP, and which router each of its turns went to."""

import asyncio
import http.client
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvloop.cli.demo import script
from kvloop.cli.errors import CommandFailed
from kvloop.cli.places import SMOLLM2
from kvloop.cli.top.collecting import parse, scrape
from kvloop.cli.top.samples import summed, total

MAX_TOKENS = 24
_TURN_S = 300.0
_COUNTED_S = 10.0


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One turn."""

    number: int
    router: str
    """The router that counted it."""
    verdict: str
    reason: str
    prompt_tokens: int
    reused_tokens: int
    duration_ms: float
    """From the request to the whole answer, over HTTP."""

    def line(self) -> str:
        """Return the turn as a line."""
        return (
            f"turn {self.number}: {self.router:<9} {self.verdict.upper():<9} ({self.reason}), "
            f"{self.reused_tokens} of {self.prompt_tokens} prompt tokens reused, {self.duration_ms:.0f} ms"
        )


async def play(gateway: str, routers: Mapping[str, str], turns: int) -> AsyncIterator[PlayedTurn]:
    """Yield the turns of a conversation as they are answered. routers: metrics endpoint by name.

    Raises CommandFailed.
    """
    session = f"cluster-{secrets.token_hex(6)}"
    messages = [{"role": "system", "content": script.SYSTEM}]
    for number, message in enumerate(script.turns()[:turns], 1):
        messages.append({"role": "user", "content": message})
        before = await _counts(routers)
        begun = time.perf_counter()
        headers, answer = await asyncio.to_thread(_post, gateway, session, messages)
        took_ms = (time.perf_counter() - begun) * 1000
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        yield PlayedTurn(
            number=number,
            router=await _counted(routers, before),
            verdict=headers.get("x-kvloop-verdict", ""),
            reason=headers.get("x-kvloop-reuse-reason", ""),
            prompt_tokens=answer["usage"]["prompt_tokens"],
            reused_tokens=int(headers.get("x-kvloop-reused-tokens", 0)),
            duration_ms=took_ms,
        )


def _post(gateway: str, session: str, messages: list[dict[str, str]]) -> tuple[dict[str, str], Any]:
    request = {"model": SMOLLM2, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection(gateway, timeout=_TURN_S)
    try:
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
        response = connection.getresponse()
        body = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(f"the gateway did not answer ({type(error).__name__})") from None
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise CommandFailed(f"the gateway answered {response.status}: {body[:500]}")
    return {name.lower(): value for name, value in response.getheaders()}, json.loads(body)


async def _counts(routers: Mapping[str, str]) -> dict[str, float]:
    texts = await asyncio.gather(*(scrape(endpoint) for endpoint in routers.values()))
    return {
        name: total(summed(parse(text)), "kvloop_turns_total") if text is not None else 0.0
        for name, text in zip(routers, texts, strict=True)
    }


async def _counted(routers: Mapping[str, str], before: Mapping[str, float]) -> str:
    """Return the router that has counted one more turn. Raises CommandFailed when none does."""
    deadline = time.monotonic() + _COUNTED_S
    while time.monotonic() < deadline:
        now = await _counts(routers)
        if grown := [name for name in routers if now[name] > before[name]]:
            return grown[0]
        await asyncio.sleep(0.05)
    raise CommandFailed("no router counted the turn")
