"""Settings of a prefill worker."""

from typing import Self

from pydantic import Field, model_validator

from kvloop.engine.worker import WorkerSettings, parse_endpoint
from kvloop.prefill.peers import ANY_LOOPBACK


class PrefillSettings(WorkerSettings):
    """What `kvloop serve prefill` may be told. Times are in seconds."""

    listen: str = "127.0.0.1:50051"
    """host:port of the PrefillService; port 0 takes a free one."""
    decode_endpoints: tuple[str, ...] = (ANY_LOOPBACK,)
    """host:port of the decode workers that a request may make this worker dial, besides those that the
    registry knows; "loopback" stands for all of this host."""
    begin_read_timeout_s: float = Field(0.5, gt=0)
    """How long a decode worker may take to say whether its lease can be read."""
    end_read_timeout_s: float = Field(1.0, gt=0)
    """How long one attempt to end a pin may take."""
    pin_s: float = Field(30.0, gt=0)
    """How long a read may take; a decode worker holds the blocks for so long."""
    drain_limit_s: float = Field(30.0, ge=0)
    """How long a draining worker waits for its prompts' KV to be fetched."""
    max_peers: int = Field(256, ge=1)
    """Decode workers to which channels are kept open."""

    @model_validator(mode="after")
    def _refuse_bad_endpoints(self) -> Self:
        for endpoint in self.decode_endpoints:
            if endpoint != ANY_LOOPBACK:
                parse_endpoint("decode_endpoints", endpoint)
        return self
