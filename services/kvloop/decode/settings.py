"""Settings of a decode worker."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvloop.engine.worker import WorkerSettings


class DecodeSettings(WorkerSettings):
    """What `kvloop serve decode` may be told. Times are in seconds."""

    listen: str = "127.0.0.1:50052"
    """host:port of the DecodeService; port 0 takes a free one."""
    max_ttl_s: float = Field(3600.0, gt=0)
    """Longest time for which a turn is held: as asked, or because its conversation's session is open."""
    pin_s: float = Field(30.0, gt=0)
    """Time of a read whose reader names none."""
    max_pin_s: float = Field(120.0, gt=0)
    """Longest time for which a reader may pin."""
    directory_margin_s: float = Field(5.0, ge=0)
    """How much earlier than its lease a directory entry ends."""
    prefix_hints: bool = True
    """Whether leases are found by their tokens' beginning too, for turns that name no conversation."""
    publish_bound_s: float = Field(30.0, ge=0)
    """For how long the publication of a lease is tried again."""
    direct_budget_tokens: int = Field(1024, ge=1)
    """Suffix tokens that DIRECT turns compute here at a time; more are sent through a prefill worker."""
    soft_hints: bool = False
    """Whether the directory keeps naming an evicted lease, so that a DIRECT turn may find its blocks in the
    prefix cache."""
    drain_limit_s: float = Field(30.0, ge=0)
    """For how long a draining worker serves its leases."""
    guards_off: tuple[Literal["epoch", "scope"], ...] = ()
    """Guards of BeginRead that are switched off; tests only, with test_hooks."""

    @model_validator(mode="after")
    def _refuse_contradictions_of_time(self) -> Self:
        if self.guards_off and not self.test_hooks:
            raise ValueError("guards_off is for tests of the guards; remove it, or set test_hooks")
        if self.pin_s > self.max_pin_s:
            raise ValueError(
                f"pin_s ({self.pin_s} s) is more than max_pin_s ({self.max_pin_s} s); lower the first"
            )
        if self.decoder_kv_blocks_ttl > self.max_ttl_s:
            raise ValueError(
                f"decoder_kv_blocks_ttl ({self.decoder_kv_blocks_ttl} s) is more than max_ttl_s "
                f"({self.max_ttl_s} s); lower the first or raise the second"
            )
        return self
