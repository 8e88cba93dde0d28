"""A target in memory: remembers what it was asked, answers at once with figures that can be foretold."""

from dataclasses import dataclass, field

from kvloop.bench.target import Outcome, Read, Request, TargetFailed


@dataclass
class FakeTarget:
    """Answers with ids that only the prompt decides."""

    name: str = "fake"
    fails_at: int | None = None
    """Number of the request (from 1) that fails."""
    asked: list[Request] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    closed: bool = False

    async def send(self, request: Request) -> Outcome:
        self.asked.append(request)
        if self.fails_at == len(self.asked):
            raise TargetFailed("no answer")
        answer = [7 + (sum(request.prompt) + place) % 100 for place in range(request.max_tokens)]
        held = len(request.prompt) // 2 if request.reuse else 0
        # Its P has a prefix cache, which holds what came just before.
        hot = self.name == "hot" and not request.reuse and self._just_before(request)
        local = len(request.prompt) // 4 if hot else 0
        return Outcome(
            token_ids=answer,
            ttft_ms=100.0 if held else 1000.0,
            latency_ms=1500.0,
            input_num_tokens=len(request.prompt),
            output_num_tokens=len(answer),
            verdict=("DIRECT" if self.name == "direct" else "READBACK") if held else "RECOMPUTE",
            reason="PROVEN" if held else "DISABLED",
            tokens={
                "p_local": local,
                "readback": held,
                "d_local": 0,
                "computed": len(request.prompt) - held - local,
            },
            prefill_ms=80.0 if held else 900.0,
            readback=Read(20.0, 4096, 3) if held else Read(),
        )

    def _just_before(self, request: Request) -> bool:
        return len(self.asked) > 1 and self.asked[-2].conversation_id == request.conversation_id

    async def end(self, conversation_id: str, cache_salt: str = "") -> None:
        self.ended.append((conversation_id, cache_salt))

    async def close(self) -> None:
        self.closed = True
