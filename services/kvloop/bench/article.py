"""The article's own results, as far as it says them in words: the ends of its curves.

Measured there: two p5en.48xlarge over EFA, 1P1D, tensor parallel 8, P without prefix cache.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ends:
    """Milliseconds at the shortest and at the longest prompt."""

    short: float
    long: float


@dataclass(frozen=True, slots=True)
class ArticleTable:
    """One model."""

    model: str
    short_tokens: int
    long_tokens: int
    ttft_off: Ends
    ttft_on: Ends
    prefill_off: Ends
    prefill_on: Ends
    """Transfer included."""
    transfer: Ends

    @property
    def label(self) -> str:
        """Return whose and what it is."""
        return f"the article's: {self.model}, TP8, EFA"


QWEN3_32B = ArticleTable(
    model="Qwen3-32B",
    short_tokens=2_048,
    long_tokens=24_576,
    ttft_off=Ends(158, 778),
    ttft_on=Ends(122, 460),
    prefill_off=Ends(153, 744),
    prefill_on=Ends(128, 414),
    transfer=Ends(30, 130),
)
GLM_5_FP8 = ArticleTable(
    model="GLM-5-FP8",
    short_tokens=2_048,
    long_tokens=20_480,
    ttft_off=Ends(500, 2_334),
    ttft_on=Ends(358, 702),
    prefill_off=Ends(500, 2_331),
    prefill_on=Ends(316, 541),
    transfer=Ends(29, 110),
)
TABLES = (QWEN3_32B, GLM_5_FP8)
