"""Settings of the gateway process."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from kvloop.engine.settings import SMOLLM2, smollm2_dir
from kvloop.runtime.config import TracedSettings
from kvloop.runtime.security import SecuredSettings

MIB = 1024 * 1024


class GatewaySettings(SecuredSettings, TracedSettings):
    """What the gateway serves, where its routers are, and its bounds."""

    listen: str = "127.0.0.1:8000"
    """host:port of the HTTP door, IPv6 in brackets; port 0 takes a free one."""
    chat_listen: str = "127.0.0.1:7700"
    """host:port of ChatService (gRPC), as listen; "" leaves it out."""
    router: str = "127.0.0.1:7600"
    """host:port of RouterService; several, separated by commas, share the turns, and so do all the addresses
    of a name."""
    router_streams: int = Field(1, ge=1, le=64)
    """Streams that carry the turns to each of them. Behind a balancer, which sends each to some router, take
    several."""
    model: str = Field(SMOLLM2, min_length=1)
    """Hugging Face name, path, or "smollm2" for the fetched checkpoint. Only its configuration, tokenizer and
    chat template are read."""
    served_model_name: str | None = None
    """Name in requests; must be the workers'."""
    revision: str | None = None
    """Revision on the hub."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that the workers serve, by name."""
    max_model_len: int | None = Field(None, ge=2)
    """Tokens of prompt and answer; must be the workers'. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls. None: hermes for smollm2, otherwise tools are refused."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning."""
    chat_template: Path | None = None
    """Template in place of the model's own."""
    turn_timeout_s: float = Field(600.0, gt=0)
    """Deadline of a turn when the client names none."""
    max_turn_timeout_s: float = Field(3600.0, gt=0)
    """Longest deadline that a client may name (X-Request-Timeout, in seconds)."""
    client_priority: bool = False
    """Whether clients may set a turn's priority; otherwise theirs is ignored."""
    hold_on_cancel: bool = True
    """Whether KV is held after a turn whose client has gone, for the retry."""
    max_turns_per_request: int = Field(64, ge=1)
    """Most answers that a request may ask for: its prompts, times n."""
    hold_unnamed: bool = True
    """Whether turns that name no conversation are held too; the next one is found by its beginning."""
    max_body_bytes: int = Field(16 * MIB, ge=1024)
    """Largest request body."""
    render_cache_bytes: int = Field(256 * MIB, ge=0)
    """Bound of the cache of rendered messages and generated answers; 0 turns both off."""
    render_cache_tenant_bytes: int = Field(64 * MIB, ge=0)
    """Bound of one tenant's part of it."""
    render_check_every: int = Field(1000, ge=0)
    """Every so many cached renderings one is compared with a full one; 0: never."""
    exact_history: bool = True
    """Whether generated ids are put back where an answer comes back unchanged."""
    drain_s: float = Field(30.0, ge=0)
    """How long turns may run on when the gateway stops."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, for its API server alone."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if not self.router_endpoints:
            raise ValueError("router is empty; name at least one host:port")
        if self.turn_timeout_s > self.max_turn_timeout_s:
            raise ValueError("turn_timeout_s exceeds max_turn_timeout_s; raise the second or lower the first")
        return self

    @property
    def router_endpoints(self) -> tuple[str, ...]:
        """Return the routers' endpoints."""
        return tuple(part.strip() for part in self.router.split(",") if part.strip())

    @property
    def model_path(self) -> str:
        """Return what vLLM reads: a path or a hub name."""
        return str(smollm2_dir()) if self.model == SMOLLM2 else self.model

    @property
    def model_name(self) -> str:
        """Return the name under which the model is served."""
        return self.served_model_name or self.model

    @property
    def tool_parser(self) -> str | None:
        """Return the parser of tool calls, or None when tools are refused."""
        return self.tool_call_parser or ("hermes" if self.model == SMOLLM2 else None)
