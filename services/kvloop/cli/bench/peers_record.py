"""What a run of `kvloop bench peers` has measured so far, as the file has it at any time."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.bench import peers as measure
from kvloop.bench import peers_real
from kvloop.bench.records import keep_record
from kvloop.cli.bench import environment, peers_parts, peers_vllm


@dataclass(slots=True)
class PeersRecord:
    """Figures and reasons of both parts. Reasons, verdicts and turns may grow while they are in here."""

    out: Path
    settings: Mapping[str, Any]
    versions: dict[str, str]
    """Of the peers."""
    when: str = field(default_factory=environment.now)
    begun: float = field(default_factory=time.monotonic)
    busy: float = field(default_factory=lambda: os.getloadavg()[0])
    complete: bool = False
    floors: dict[str, str] = field(default_factory=dict)
    firsts: dict[tuple[int, int], dict[str, list[float]]] = field(default_factory=dict)
    costs: dict[int, Any] = field(default_factory=dict)
    verdicts: list[Mapping[str, Counter[str]]] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=dict)
    reasons: list[Mapping[str, str]] = field(default_factory=list)
    turns: list[peers_real.RealTurn] = field(default_factory=list)
    """On real vLLM."""
    real_reasons: list[Mapping[str, str]] = field(default_factory=list)
    proxy_log: dict[str, int] = field(default_factory=dict)

    def keep(self) -> dict[str, Any]:
        """Write the file, in one go, and return what is in it."""
        record = self.as_dict()
        keep_record(self.out, record)
        return record

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "complete": self.complete,
            "peers": self._peers(),
            "when": self.when,
            "machine": environment.machine(),
            "versions": environment.versions() | self.versions,
            # Of the whole machine, before and after: what is beyond some two was not ours.
            "load_average": [round(self.busy, 1), round(os.getloadavg()[0], 1)],
            "wall_s": round(time.monotonic() - self.begun),
            "settings": dict(self.settings),
            "engines": self.engines,
            "identical": peers_real.identical(self.turns) if self.turns else {},
            "proxy_log": self.proxy_log,
            "samples": {
                "first_chunk_ms": {f"{tokens}/{n}": samples for (tokens, n), samples in self.firsts.items()},
                "cpu": {
                    str(tokens): [one.as_dict() for one in found] for tokens, found in self.costs.items()
                },
                "real": peers_real.as_records(self.turns),
            },
        }

    def _peers(self) -> dict[str, Any]:
        """Return what is known of each: figures of both parts, or why there are none."""
        played = peers_real.summarise(self.turns, peers_parts.KVLOOP)
        record = {}
        for name, what in {**peers_parts.WHAT, **peers_vllm.WHAT}.items():
            floor, ttft = self.floors.get(name), played.get(name, {})
            figures = measure.figures(name, floor, self.firsts, self.costs) if floor else {}
            verdicts = sum((told.get(name, Counter()) for told in self.verdicts), Counter[str]())
            strayed = measure.astray(verdicts, peers_parts.VERDICT)
            on_real = [told[name] for told in self.real_reasons if told.get(name)]
            on_real.append(measure.astray(ttft.get("later_verdicts", {}), peers_vllm.VERDICTS.get(name, "")))
            reasons = [*(told.get(name, "") for told in self.reasons), strayed]
            reasons += [f"on real vLLM: {said}" for said in filter(None, on_real)]
            record[name] = {
                "samples": measure.samples_of(figures) + ttft.get("samples", 0),
                "what": what,
                # A peer that can't run says so of each kind of engines.
                "reason": "; ".join(dict.fromkeys(filter(None, reasons))),
                "verdicts": dict(sorted(verdicts.items())),
                "overhead": figures,
                "real": ttft,
            }
        return record
