"""Faults on order: what tests and chaos runs break in one simulated engine.

Counts go down as they are used; everything else stays until set back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloop.engine.simulated.handle import Guard


@dataclass(slots=True)
class Faults:
    """One engine's faults. All off at first."""

    fail_prefills: int = 0
    """So many prefills end in WORKER_FAILED."""
    fail_decodes: int = 0
    """So many decodes end in WORKER_FAILED, before their first token."""
    fail_reads: int = 0
    """So many reads by this engine fail in the transfer."""
    stall_reads: int = 0
    """So many reads by this engine take stall_s longer."""
    stall_s: float = 60.0
    corrupt_reads: int = 0
    """So many reads by this engine meet other tokens' blocks, truthfully described, under the handle."""
    network_slowdown: float = 1.0
    """Factor of the time of every read by this engine."""
    network_delay_s: float = 0.0
    """Added to every read by this engine, also in the instant preset."""
    drop_read_notices: int = 0
    """So many "read is over" notices by this engine are lost."""
    drop_hold_events: int = 0
    """So many HoldEnded events of this engine are lost."""
    spoil: str | None = None
    """What is wrong with the handles that this engine gives out, see Handle.spoiled."""
    stall: str | None = None
    """Reads by this engine wait before they start ("start"), or are not seen to end ("end")."""
    guard: Guard = field(default_factory=Guard)
    """What this engine checks before it trusts what it reads."""
    _unstalled: asyncio.Event = field(default_factory=asyncio.Event)
    _kill: "Callable[[], None] | None" = None
    _pause: "Callable[[], None] | None" = None
    _resume: "Callable[[], None] | None" = None
    _jump: "Callable[[float], None] | None" = None
    _evict: "Callable[[str], bool] | None" = None

    def wire(
        self,
        *,
        kill: Callable[[], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
        jump: Callable[[float], None],
        evict: Callable[[str], bool],
    ) -> None:
        """Connect the faults that are acts."""
        self._kill, self._pause, self._resume, self._jump, self._evict = kill, pause, resume, jump, evict

    def kill(self) -> None:
        """End the engine as SIGKILL would: everything raises WORKER_FAILED until start() is called."""
        if self._kill is not None:
            self._kill()

    def pause(self) -> None:
        """Stop the engine as SIGSTOP would: nothing fails, nothing answers."""
        if self._pause is not None:
            self._pause()

    def resume(self) -> None:
        """Go on after pause."""
        if self._resume is not None:
            self._resume()

    def jump_clock(self, seconds: float) -> None:
        """Move the engine's monotonic clock, as after a suspended host."""
        if self._jump is not None:
            self._jump(seconds)

    def evict(self, lease_id: str) -> bool:
        """Let the engine evict one hold; False when there is none."""
        return self._evict is not None and self._evict(lease_id)

    def stall_at(self, where: str | None) -> None:
        """Have reads wait at their "start" or "end"; None lets them go on."""
        if where not in {None, "start", "end"}:
            raise ValueError(where)
        self.stall = where
        self._unstalled.set()

    async def stalled(self, where: str) -> None:
        """Wait while reads are to wait there."""
        while self.stall == where:
            self._unstalled.clear()
            await self._unstalled.wait()

    def take(self, name: str) -> bool:
        """Return whether a counted fault strikes now, and count it."""
        left: int = getattr(self, name)
        if left <= 0:
            return False
        setattr(self, name, left - 1)
        return True
