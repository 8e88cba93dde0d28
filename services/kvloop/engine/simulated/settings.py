"""Settings of one simulated engine."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvloop.engine.settings import READ_MARGIN_S, EngineSettings
from kvloop.engine.simulated.cost import PRESETS
from kvloop.engine.simulated.lexicon import vocab_size_of


@dataclass(frozen=True)
class SimulatedSettings:
    """What one simulated engine is; a contradiction is a ValueError that says what to change."""

    model_name: str = "simulated"
    revision: str = ""
    adapters: tuple[str, ...] = ()
    max_model_len: int = 32_768
    vocab_size: int = 32_000
    tokenizer: str = ""
    """Folder of a model whose tokenizer gives the tokens their text; without one they are made-up words."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int = 8_192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    enable_prefix_caching: bool = True
    decoder_kv_blocks_ttl: float = 480.0
    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = True
    prefill_hold_s: float = 30.0
    hold_share: float = 0.5
    read_margin_s: float = READ_MARGIN_S
    """A reader declines what expires within this time."""
    preset: str = "instant"
    """Name of the cost model: a key of cost.PRESETS."""
    time_scale: float = 1.0
    """Factor of every simulated duration; deadlines are not scaled."""
    eos_token_id: int = 2
    eos_every: int = 400
    """An answer meets EOS once in so many tokens, always at the same place."""
    weights_version: str = ""
    control_path: Path | None = None
    """Unix socket at which tests reach the faults; only with test_hooks."""
    test_hooks: bool = False
    seed: int = 0
    """Names the weights: engines of different seeds compute different KV."""
    hash_seed: str = "0"
    """vLLM's PYTHONHASHSEED: block hashes of different seeds never agree."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; set one of {', '.join(sorted(PRESETS))}")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_blocks * block_size ({self.num_blocks * self.block_size}) is less than "
                f"max_model_len ({self.max_model_len}); raise the first or lower the second"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}); raise the first or lower the second"
            )
        if not 0 < self.hold_share < 1:
            raise ValueError("hold_share must be between 0 and 1; set for example 0.5")

    @classmethod
    def from_engine_settings(cls, settings: EngineSettings) -> "SimulatedSettings":
        """Return the simulated engine that a worker's settings mean.

        A model named like a cost preset gets that preset. `extra_engine_args` holds this class's own
        fields ("preset", "time_scale", "num_blocks", ...). Raises ValueError for names it doesn't know.
        """
        own: dict[str, Any] = {}
        for field in fields(cls):
            value = getattr(settings, field.name, None)
            if value is not None:
                own[field.name] = value
        own["adapters"] = tuple(settings.adapters)
        if settings.model in PRESETS:
            own["preset"] = settings.model
        known = {field.name for field in fields(cls)}
        for name, value in settings.extra_engine_args.items():
            if name not in known:
                raise ValueError(f"extra_engine_args.{name} means nothing to a simulated engine; remove it")
            own[name] = value
        if own.get("tokenizer"):
            own.setdefault("vocab_size", vocab_size_of(own["tokenizer"]))
        standard: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        block_size = own.get("block_size", standard["block_size"])
        if "num_blocks" not in own:
            if settings.kv_cache_memory_bytes is not None:
                per_token = PRESETS[own.get("preset", standard["preset"])].bytes_per_token
                own["num_blocks"] = settings.kv_cache_memory_bytes // (per_token * block_size)
            else:
                longest = own.get("max_model_len", standard["max_model_len"])
                own["num_blocks"] = max(standard["num_blocks"], 4 * -(-longest // block_size))
        batched = own.get("max_num_batched_tokens", standard["max_num_batched_tokens"])
        own.setdefault("max_num_seqs", min(standard["max_num_seqs"], batched))
        return cls(**own)
