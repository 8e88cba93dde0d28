"""What the cluster demo found, what it must have found, and how it is shown and kept."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloop.cli.demo.cluster_play import PlayedTurn

if TYPE_CHECKING:
    from rich.console import Group

# Who must have a part in the trace of a turn that read back.
_TRACED = frozenset({"kvloop-gateway", "kvloop-router", "kvloop-prefill", "kvloop-decode"})
_REUSED = frozenset({"readback", "direct"})


@dataclass(slots=True)
class ClusterRecord:
    """One run."""

    engine: str
    turns: list[PlayedTurn] = field(default_factory=list)
    prometheus: dict[str, dict[str, float]] = field(default_factory=dict)
    """Query -> labels -> value."""
    trace: list[dict[str, Any]] = field(default_factory=list)
    """Spans of one turn, by start."""
    screen: str = ""
    """What `kvloop top` showed."""
    pids: dict[str, int] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)

    def complaints(self) -> list[str]:
        """Return what a run must show, and did not."""
        found = []
        later = self.turns[1:]
        cold = [f"{turn.number} ({turn.reason})" for turn in later if turn.verdict not in _REUSED]
        if cold:
            found.append(f"turns reused nothing: {', '.join(cold)}")
        handed_on = [b.number for a, b in zip(self.turns, later, strict=False) if a.router != b.router]
        if not handed_on:
            found.append("every turn went to the same router")
        if {span["service"] for span in self.trace} < _TRACED:
            found.append("no trace spans gateway, router, prefill and decode worker")
        if self.prometheus.get("canary", {}).get("mismatch"):
            found.append("the canary found wrong tokens")
        if firing := self.prometheus.get("alerts"):
            found.append(f"alerts fire: {', '.join(firing)}")
        if self.left_behind:
            found.append(f"still there: {', '.join(self.left_behind)}")
        return found

    @staticmethod
    def longest_trace(file: Path) -> list[dict[str, Any]]:
        """Return the trace with the most services and spans of a file of spans."""
        traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                span = json.loads(line)
                traces[span["trace_id"]].append(span)

        def weight(spans: list[dict[str, Any]]) -> tuple[int, int]:
            return len({span["service"] for span in spans}), len(spans)

        best = max(traces.values(), key=weight, default=[])
        return sorted(best, key=lambda span: int(span["start_us"]))

    def write(self, folder: Path) -> None:
        """Write cluster.json, trace.json and top.txt."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "engine": self.engine,
            "turns": [asdict(turn) for turn in self.turns],
            "prometheus": self.prometheus,
            "processes": sorted(self.pids),
            "complaints": self.complaints(),
        }
        (folder / "cluster.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (folder / "trace.json").write_text(json.dumps(self.trace, indent=1) + "\n", encoding="utf-8")
        (folder / "top.txt").write_text(self.screen + "\n", encoding="utf-8")

    def shown(self) -> "Group":
        """Return everything for a terminal."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        turns = Table(title="one conversation, three routers", box=None, title_justify="left")
        for heading in ("turn", "router", "verdict", "prompt", "reused", "ms"):
            turns.add_column(heading, justify="left" if heading in {"router", "verdict"} else "right")
        for turn in self.turns:
            turns.add_row(
                *(str(turn.number), turn.router, f"{turn.verdict.upper()} ({turn.reason})"),
                *(str(turn.prompt_tokens), str(turn.reused_tokens), f"{turn.duration_ms:.0f}"),
            )
        said = Table(title="\nPrometheus", box=None, title_justify="left", show_header=False)
        for name, values in self.prometheus.items():
            told = ", ".join(f"{labels} {value:g}".strip() for labels, value in values.items())
            said.add_row(name, told or "none")
        trace = Table(title="\none trace", box=None, title_justify="left", show_header=False)
        depth = _depths(self.trace)
        for span in self.trace:
            indent = "  " * depth[span["span_id"]]
            trace.add_row(
                indent + span["name"],
                span["service"].removeprefix("kvloop-"),
                f"{span['duration_ms']:.1f} ms",
            )
        return Group(turns, said, trace, Text("\nkvloop top"), Text(self.screen))


def _depths(spans: list[dict[str, Any]]) -> dict[str, int]:
    parents = {span["span_id"]: span["parent_id"] for span in spans}

    def depth(span: str) -> int:
        parent = parents.get(span)
        return 1 + depth(parent) if parent is not None and parent in parents else 0

    return {span: depth(span) for span in parents}
