"""What a demo run found: the shape of out/demo.json, and what makes a run a failure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of one leg."""

    turn: int
    """From 1."""
    prompt_tokens: int
    verdict: str
    reason: str
    tokens: dict[str, int]
    """Prompt tokens by source: p_local, readback, d_local, computed."""
    engine_external_tokens: int
    """By how much the prefill engine's own counter of tokens loaded from elsewhere grew."""
    prefill_ms: float
    ttft_ms: float
    """From sending the turn to its first token, at the client."""
    transfer_ms: float
    transfer_bytes: int
    descriptors: int
    token_ids: list[int]
    """The answer."""
    text: str


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """Both legs."""

    on: list[TurnRecord]
    off: list[TurnRecord]
    settings: dict[str, Any]
    versions: dict[str, str]
    expected: Sequence[tuple[str, str]] = ()
    """Verdict and reason of every turn with reuse."""

    @property
    def identical(self) -> bool:
        """Tell whether every turn's answer is the same, token by token."""
        on, off = ([turn.token_ids for turn in leg] for leg in (self.on, self.off))
        return len(on) > 0 and on == off

    def complaints(self) -> list[str]:
        """Return what is wrong with the run, as sentences; empty for a good one."""
        found = []
        for on, off in zip(self.on, self.off, strict=True):
            if on.token_ids != off.token_ids:
                found.append(f"turn {on.turn}: the answers with and without reuse differ")
            if not _as_it_says(on):
                found.append(f"turn {on.turn}: its tokens did not come as {on.verdict} ({on.reason}) says")
            if on.tokens["readback"] != on.engine_external_tokens:
                found.append(
                    f"turn {on.turn}: {on.tokens['readback']} tokens were reported as read back, but the "
                    f"engine counted {on.engine_external_tokens}"
                )
            if off.transfer_bytes or off.engine_external_tokens:
                found.append(f"turn {off.turn}: the leg without reuse read from D")
        for number, (verdict, why) in enumerate(self.expected, start=1):
            took = [(turn.verdict, turn.reason) for turn in self.on if turn.turn == number]
            if took != [(verdict, why)]:
                found.append(f"turn {number} did not go {verdict} ({why})")
        return found

    def write(self, file: Path) -> None:
        """Write the record as JSON."""
        document = {
            "legs": {"on": [asdict(turn) for turn in self.on], "off": [asdict(turn) for turn in self.off]},
            "identical": self.identical,
            "settings": self.settings,
            "versions": self.versions,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _as_it_says(turn: TurnRecord) -> bool:
    """Tell whether the tokens' sources are those of the verdict."""
    read, held = turn.transfer_bytes > 0 and turn.tokens["readback"] > 0, turn.tokens["d_local"] > 0
    return (read, held) == {"READBACK": (True, False), "DIRECT": (False, True)}.get(
        turn.verdict, (False, False)
    )
