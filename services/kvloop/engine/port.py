"""The Engine port: what prefill and decode services need of an inference engine.

One engine is one leg's worth of memory and compute. KV that outlives its turn is a *hold*: blocks kept
in the engine's pool under a lease id, with a deadline, readable by other engines through handles. The
engine owns the table of holds, because eviction happens inside its scheduler; the services own
everything the directory sees.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvloop.v1alpha1 import sampling_pb2, turn_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change in the life of one engine process, but by a reload of its weights."""

    engine: str
    """"vllm" or "simulated"."""
    version: str
    epoch: str
    """Random; names this life of this process."""
    model_name: str
    model_revision: str
    adapters: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    block_size: int
    """Tokens per KV block."""
    compatibility: str
    """Digest of what two engines must have equal to exchange KV."""
    bidirectional_kv_xfer: bool
    kv_recompute_threshold: int
    hold_s: float = 0.0
    """Seconds for which a decode engine holds a turn's blocks."""
    side_channel: str = ""
    """host:port where peers begin their reads; "" when there is none."""
    transfer_backends: tuple[str, ...] = ()
    """What moves KV between engines ("UCX", "LIBFABRIC"); empty when not known."""
    prefix_caching: bool = True
    default_max_tokens: int = 0
    """Tokens of an answer that asks for no max_tokens; 0: as many as max_model_len leaves."""
    max_num_seqs: int = 0
    """Sequences that it runs at a time; 0 when not known."""


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """One completed KV read."""

    duration_ms: float
    bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompt tokens by where their KV came from, as the engine's scheduler counted them."""

    local: int
    external: int
    computed: int


@dataclass(frozen=True, slots=True)
class ReadGrant:
    """Leave to read a hold, as its engine gave it."""

    read_id: str
    handle_json: str
    """kv_transfer_params, carried unread; cut to num_tokens."""
    num_tokens: int
    pin_s: float
    """Seconds for which the blocks are held for this read."""
    side_channel: str = ""
    """Where the holder has announced that its reads begin, host:port; a handle that names another place is
    refused. "" when that is not known."""


@dataclass(frozen=True, slots=True)
class HoldTerms:
    """What to keep of a turn, and for how long."""

    lease_id: str
    ttl_s: float
    on_cancel: bool
    tenant: str = ""
    """Whose share of the hold budget it counts against."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One hold of the engine's table."""

    lease_id: str
    num_tokens: int
    """Tokens whose KV is held: prompt and answer, less what was not computed."""
    num_blocks: int
    remaining_s: float
    pins: int = 0
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """The engine let go of a hold that nobody asked it to let go of."""

    lease_id: str
    reason: str
    """"expired", "evicted" or "revoked"."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """The first leg of a turn."""

    request_id: str
    prompt: bytes
    """Packed little-endian uint32."""
    sampling: sampling_pb2.SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    read: ReadGrant | None = None
    first_token: bool = False
    """Whether the answer's first token is wanted."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer, sampled where its prompt was computed."""

    token_id: int
    text: str = ""
    logprobs: Sequence[turn_pb2.PositionLogprobs] = ()
    ends: bool = False
    """Whether the answer ends with it, at EOS or a stop token."""


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The prompt's KV, ready to be read by one decode engine."""

    handle_json: str
    held_s: float
    sources: Sources
    readback: TransferFacts | None = None
    prompt_logprobs: Sequence[turn_pb2.PositionLogprobs] = ()
    first: FirstToken | None = None
    """When asked for."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """The second leg of a turn."""

    request_id: str
    prompt: bytes
    """Packed little-endian uint32."""
    sampling: sampling_pb2.SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    handle_json: str | None = None
    """The prefill engine's handle; None computes the prompt here (DIRECT)."""
    hold: HoldTerms | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended."""

    reason: "turn_pb2.FinishReason.ValueType"
    stop_reason: str | None
    """The stop string, or the stop token id in decimal."""
    sources: Sources
    hold: Hold | None
    """What is held of the turn from now on."""
    handoff: TransferFacts | None = None


@dataclass(frozen=True, slots=True)
class DecodeDelta:
    """New tokens; the last one carries the finish."""

    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[turn_pb2.PositionLogprobs] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class EngineLoad:
    """What the engine has to do right now."""

    running: int = 0
    waiting: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One inference engine.

    Methods raise kvloop.runtime.errors.Failure: INVALID_FIELD for parameters that the engine refuses
    (field "sampling.<name>"), KV_READ_FAILED when a read of remote KV failed or was refused,
    LEASE_NOT_FOUND for holds that are not there, WORKER_FAILED when the engine is gone.
    """

    @property
    def facts(self) -> EngineFacts:
        """Return the facts; valid once started."""
        ...

    async def start(self) -> None:
        """Load the model and be ready for jobs."""
        ...

    async def stop(self) -> None:
        """End the engine and its processes. Idempotent."""
        ...

    async def check_health(self) -> None:
        """Return when the engine can serve.

        Failures: WORKER_FAILED when it is dead; NO_WORKER when a reload may help.
        """
        ...

    async def prefill(self, job: PrefillJob) -> PrefillOutcome:
        """Compute, or read, the prompt's KV and hold it for one decode engine.

        Cancellation aborts the job; nothing stays held.
        """
        ...

    async def prefill_ended(self, request_id: str, patience_s: float) -> bool:
        """Return once a cancelled prefill is over in the engine, which then keeps nothing of what it reads.

        False when it is not after patience_s.
        """
        ...

    async def release_prefill(self, request_id: str) -> bool:
        """Let go of a prefill outcome that nobody will read; False when nothing was held."""
        ...

    def decode(self, job: DecodeJob) -> AsyncIterator[DecodeDelta]:
        """Generate. Closing the iterator before the finish cancels the turn."""
        ...

    async def settle(self, lease_id: str, patience_s: float | None = None) -> Hold | None:
        """Return the hold of a cancelled turn once the engine has it, or None when it keeps nothing.

        None, too, when the turn has not ended after patience_s; left out, after some seconds.
        """
        ...

    async def begin_read(self, lease_id: str, num_tokens: int, pin_s: float) -> ReadGrant:
        """Pin a hold and return a handle cut to its first num_tokens tokens."""
        ...

    async def end_read(self, lease_id: str, read_id: str) -> None:
        """Take a pin off. Unknown pins are ignored."""
        ...

    async def release(self, lease_id: str) -> bool:
        """End a hold; while pinned it is doomed instead. False when there is none."""
        ...

    async def revoke_all(self) -> None:
        """End every decode turn's hold, known to the services or not; pinned ones are doomed instead."""
        ...

    async def extend(self, lease_id: str, ttl_s: float) -> bool:
        """Move a live hold's deadline to ttl_s from now, never earlier; False when there is none."""
        ...

    async def holds(self) -> list[Hold]:
        """Return the table, soonest deadline first, expired ones left out."""
        ...

    def hold_events(self) -> AsyncIterator[HoldEnded]:
        """Yield holds that ended by deadline or eviction. One consumer."""
        ...

    async def pool(self) -> worker_pb2.PoolState:
        """Return the state of the block pool."""
        ...

    async def counters(self) -> worker_pb2.EngineCounters:
        """Return the engine's own counters since its start."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while blocks are in use."""
        ...

    async def reload_weights(self, version: str) -> None:
        """Load the weights from where they lie, under the same name, in a new epoch.

        Call it while nothing is in use or cached. Engines of different versions have different
        compatibilities and refuse each other's handles. After a failure the weights may be a mixture, and
        check_health fails until a later reload succeeds.
        """
        ...
