"""What things cost, in seconds. Fitted to measured runs; "instant" costs nothing, "paced"
nothing but the time between two tokens.

qwen3-32b-h200: two H200s on NVLink, bf16, cross-layer blocks. Its terms give 908 ms for an 8k prompt
computed anew and 49 ms for a suffix of 160 tokens after 24k tokens of history, as measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Terms of one kind of engine on one kind of machine."""

    prefill_base_s: float = 0.0
    """Per step that computes prompt tokens."""
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0
    """Attention: times (end^2 - start^2) of the positions computed."""
    decode_base_s: float = 0.0
    """Per step that generates."""
    decode_seq_s: float = 0.0
    """Per running sequence and step."""
    first_step_s: float = 0.0
    """Once per sequence that starts from KV it has read."""
    read_base_s: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second."""
    descriptor_s: float = 0.0
    descriptors_per_block: int = 1
    bytes_per_token: int = 4_096
    dead_known_s: float = 0.0
    """Until a read from a dead peer fails, when the peer had been read before."""
    dead_unknown_s: float = 0.0

    def prefill(self, spans: "list[tuple[int, int]]") -> float:
        """Return the time of one step that computes these spans of positions."""
        if not spans:
            return 0.0
        total = self.prefill_base_s
        for start, end in spans:
            total += self.prefill_token_s * (end - start)
            total += self.prefill_square_s * (end * end - start * start)
        return total

    def decode(self, sequences: int) -> float:
        """Return the time of one step that generates a token for each sequence."""
        return self.decode_base_s + self.decode_seq_s * sequences if sequences else 0.0

    def read(self, num_bytes: int, descriptors: int) -> float:
        """Return the time of one read."""
        return self.read_base_s + num_bytes / self.bandwidth + descriptors * self.descriptor_s


_QWEN3_32B = CostModel(
    prefill_base_s=20e-3,
    prefill_token_s=0.0877e-3,
    prefill_square_s=1.98e-9,
    decode_base_s=22e-3,
    decode_seq_s=0.1e-3,
    first_step_s=3e-3,
    read_base_s=13e-3,
    bandwidth=285e9,
    descriptor_s=15e-6,
    descriptors_per_block=1,
    bytes_per_token=262_144,
    dead_known_s=0.01,
    dead_unknown_s=5.0,
)

PRESETS: dict[str, CostModel] = {
    "instant": CostModel(),
    "paced": CostModel(decode_base_s=20e-3),
    "qwen3-32b-h200": _QWEN3_32B,
    # One descriptor per layer and block: vLLM's default layout.
    "qwen3-32b-h200-per-layer": CostModel(
        prefill_base_s=20e-3,
        prefill_token_s=0.0877e-3,
        prefill_square_s=1.98e-9,
        decode_base_s=22e-3,
        decode_seq_s=0.1e-3,
        first_step_s=3e-3,
        read_base_s=13e-3,
        bandwidth=394e9,
        descriptor_s=3.5e-6,
        descriptors_per_block=64,
        bytes_per_token=262_144,
        dead_known_s=0.01,
        dead_unknown_s=5.0,
    ),
    # One thread of a CPU, float32, TCP on loopback.
    "smollm2-135m-cpu": CostModel(
        prefill_base_s=0.04,
        prefill_token_s=2.155e-3,
        prefill_square_s=4.7e-7,
        decode_base_s=0.06,
        decode_seq_s=0.02,
        first_step_s=0.01,
        read_base_s=0.02,
        bandwidth=1e9,
        descriptor_s=1e-5,
        descriptors_per_block=60,
        bytes_per_token=46_080,
        dead_known_s=0.01,
        dead_unknown_s=5.0,
    ),
}
