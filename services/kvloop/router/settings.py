"""The router's settings, and the sentences that refuse contradictions."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from kvloop.runtime import endpoints
from kvloop.runtime.config import ObservedSettings
from kvloop.runtime.security import GuardedSettings

MIN_SECRET_BYTES = 16

Seed = Annotated[float, Field(ge=0)]


class RouterSettings(ObservedSettings, GuardedSettings):
    """What a router needs to know. Times in the unit of the name, counts in turns."""

    listen: str = "127.0.0.1:7600"
    """host:port of RouterService; port 0 takes any."""
    prefill_endpoints: tuple[str, ...] = ()
    """host:port of PrefillServices, comma-separated as a text; each address behind a name is one."""
    decode_endpoints: tuple[str, ...] = ()
    """host:port of DecodeServices."""
    discover: bool | None = None
    """Whether workers that announce themselves in the store are used, besides those named; absent: where
    none are named."""
    router_id: str | None = None
    """Name of this router in answers; absent: where it listens."""
    directory_url: str = ""
    """Where the leases are: redis://host:port."""
    fleet_secret: SecretStr | None = None
    """Key of all scopes and salts; the same on every router of a fleet."""
    fleet_secret_file: Path | None = None
    """File that holds the secret, instead of the secret itself."""
    tokens_file: Path | None = None
    """Hashed tenant tokens; without it everybody on loopback is tenant "default"."""
    reuse: bool = True
    """Whether histories are read back at all."""
    prefix_hints: bool = True
    """Whether a turn whose conversation is unknown, or not named, looks for its prompt's beginning."""
    hold_unnamed: bool = False
    """Whether turns that name no conversation are held, too; otherwise only those that ask for it."""
    kv_recompute_threshold: Annotated[int, Field(ge=0)] | None = None
    """Below this many readable tokens a prompt is recomputed; absent: as the workers say."""
    direct: bool = True
    """Whether a decode worker may go on from what it holds, without a prefill leg."""
    direct_max_suffix: Annotated[int, Field(ge=1)] = 512
    """Most new tokens of a prompt that a decode worker computes itself."""
    direct_budget_tokens: Annotated[int, Field(ge=1)] = 1024
    """New tokens that this router has each decode worker compute at a time."""
    by_cost: bool = True
    """Whether the cheapest of the ways that are open is taken, by measured costs; otherwise the first of
    DIRECT, READBACK and RECOMPUTE that threshold and limits leave open."""
    seed_compute: tuple[Seed, Seed, Seed] = (20.0, 0.0877, 1.98e-6)
    """Expected before anything is measured: milliseconds per prefill, per token, and per (end^2 - start^2)
    of the positions computed."""
    seed_transfer: tuple[Seed, Seed, Seed] = (6.5, 3.5e-9, 0.015)
    """The same of a KV read: milliseconds per read, per byte, per descriptor."""
    seed_first_step_ms: Annotated[float, Field(gt=0)] = 25.0
    """The same of a first token once the KV is there."""
    seed_kv: tuple[Seed, Seed] = (262_144.0, 0.0078)
    """The same of the KV of a token: bytes, descriptors."""
    explained_turns: Annotated[int, Field(ge=0, le=100_000)] = 1024
    """How many turns are remembered for `kvloop explain`."""
    canary_per_minute: Annotated[float, Field(ge=0, le=600)] = 0.0
    """Reused greedy turns that are computed once more without reuse and compared, at most; 0: none."""
    canary_max_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens of an answer that are compared."""
    canary_max_prompt_tokens: Annotated[int, Field(ge=1)] = 8_192
    """Longer prompts are not repeated: turns of other routers may wait at P for as long as these take."""
    canary_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a repeat may take."""
    max_concurrent_turns: Annotated[int, Field(ge=1)] = 1024
    """Turns served at once; more wait."""
    max_turns_per_worker: Annotated[int, Field(ge=1)] | None = None
    """Turns that this router gives one worker at a time; absent: any number."""
    max_queued_turns: Annotated[int, Field(ge=0)] = 256
    """Turns that wait to be let in; more are told to come back. Those let in wait for places at workers."""
    queue_timeout_ms: Annotated[float, Field(gt=0)] = 2000.0
    """How long a turn waits in all, at most to its deadline, before it is told to come back."""
    max_sessions: Annotated[int, Field(ge=1)] = 10_000
    """Sessions open at once; more are told to come back."""
    session_alive_s: Annotated[float, Field(ge=0.05, le=3600)] = 30.0
    """For how long a conversation counts as alive after its session broke."""
    retry_after_ms: Annotated[int, Field(ge=1)] = 200
    """When an overloaded router asks to be tried again."""
    directory_timeout_ms: Annotated[float, Field(gt=0, le=10_000)] = 25.0
    """How long a turn waits for the directory before it goes on cold; a cluster may be asked twice."""
    prefill_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest prefill leg; a worker that takes longer counts as failed."""
    first_chunk_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait of a decode leg for its first chunk."""
    chunk_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest silence (up to a quarter more) of a decode leg that has begun, though its worker answers
    questions; then the answer goes on elsewhere. Work of others may hold up a worker for seconds."""
    max_attempts: Annotated[int, Field(ge=1, le=5)] = 2
    """Tries of a turn before its first chunk; all but the first are cold, unless a worker only went away."""
    max_migrations: Annotated[int, Field(ge=0, le=16)] = 4
    """How often an answer that has begun may be taken up by another decode worker."""
    first_token_from_prefill: bool = True
    """Whether an answer that could be continued begins with a token of the prefill worker's."""
    worker_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """How long a turn waits for workers to be ready, ahead of its first leg."""
    migration_wait_s: Annotated[float, Field(ge=0)] = 10.0
    """The same of an answer that has begun."""
    info_interval_s: Annotated[float, Field(gt=0)] = 1.0
    """How often each worker is asked for its facts."""
    info_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    """How long a worker may take to tell its facts before it counts as gone."""
    drain_limit_s: Annotated[float, Field(ge=0)] = 30.0
    """How long turns may go on after draining started."""

    @property
    def discovers(self) -> bool:
        """Tell whether the store is asked for workers."""
        return (
            not (self.prefill_endpoints or self.decode_endpoints) if self.discover is None else self.discover
        )

    @field_validator("seed_compute", "seed_transfer", "seed_kv", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("prefill_endpoints", "decode_endpoints", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("prefill_endpoints", "decode_endpoints")
    @classmethod
    def _endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parsed = [_parse(text) for text in value]
        if unusable := [text for text, endpoint in zip(value, parsed, strict=True) if endpoint.port == 0]:
            raise ValueError(f"{unusable[0]} has port 0; name the port on which the worker listens")
        if len(set(parsed)) != len(parsed):
            raise ValueError("an endpoint is named twice; name each worker once")
        return tuple(str(endpoint) for endpoint in parsed)

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return str(_parse(value))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # An explicit discover may have a store that comes otherwise than by its URL.
        found = self.discovers and (self.discover or self.directory_url)
        if not found and not (self.prefill_endpoints and self.decode_endpoints):
            raise ValueError(
                "prefill_endpoints and decode_endpoints must each name at least one worker,"
                " unless directory_url names a store in which workers announce themselves"
            )
        if self.discovers and self.directory_url.startswith("memory:"):
            raise ValueError(
                "workers are found in a store that they share with the router, and memory:// is none;"
                " set directory_url, or name prefill_endpoints and decode_endpoints"
            )
        if both := sorted(set(self.prefill_endpoints) & set(self.decode_endpoints)):
            raise ValueError(f"{both[0]} is named as a prefill and as a decode worker; it can be only one")
        if self.fleet_secret is not None and self.fleet_secret_file is not None:
            raise ValueError("fleet_secret and fleet_secret_file are both set; keep one")
        if not endpoints.parse(self.listen).is_loopback:
            if self.tokens_file is None:
                raise ValueError(
                    f"listen {self.listen} is open to other hosts; set tokens_file, or listen on 127.0.0.1"
                )
            if self.fleet_secret is None and self.fleet_secret_file is None:
                raise ValueError(
                    "a router that other hosts reach shares its conversations with other routers;"
                    " set fleet_secret or fleet_secret_file to the fleet's secret"
                )
        if self.kv_recompute_threshold is not None and not self.reuse:
            raise ValueError("kv_recompute_threshold has no effect while reuse is off; remove one of them")
        if self.direct and "direct" in self.model_fields_set and not self.reuse:
            raise ValueError("direct has no effect while reuse is off; remove one of them")
        return self


def _parse(text: str) -> endpoints.Endpoint:
    try:
        return endpoints.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
