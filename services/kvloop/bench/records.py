"""One JSON object per request: what a run measured, and the only thing that its reports are made from."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvloop.bench.target import Outcome
from kvloop.runtime import tokens

REQUESTS = "requests.jsonl"


class BadRecords(ValueError):
    """A file holds no records; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times in milliseconds; start_time_ms counts from the run's begin."""

    leg: str
    nominal_tokens: int
    """Prompt length that the request stands for; 0 outside of a sweep."""
    conversation_id: str
    turn: int
    """From 1."""
    measured: bool
    """Whether it counts; warm-ups and turns that only build up a history do not."""
    start_time_ms: float = 0.0
    repetition: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    latency_ms: float = 0.0
    input_num_tokens: int = 0
    output_num_tokens: int = 0
    verdict: str = ""
    reason: str = ""
    retried: bool = False
    retokenized: bool = False
    """Whether the answer's ids were made from its text: the next prompt may not go on from what is held."""
    finish_reason: str = ""
    """What ended the answer: stop, length; empty where that is not told."""
    stop_asked: bool = False
    """Whether the request had stop strings."""
    stop_hit: bool = False
    """Whether one of them ended the answer."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by source: p_local, readback, d_local, computed; of a gateway, reused and computed."""
    prefill_ms: float = 0.0
    """The prefill leg, reading included; 0 without one."""
    transfer_ms: float = 0.0
    """The read from D to P."""
    bytes: int = 0
    descriptors: int = 0
    handoff_ms: float = 0.0
    """The read from P to D."""
    handoff_bytes: int = 0
    handoff_descriptors: int = 0
    prompt_digest: str = ""
    """Tells whether prompts are the same without telling them."""
    answer_digest: str = ""
    error: str = ""
    """Why there is no answer."""

    @classmethod
    def of(cls, outcome: Outcome, prompt: Sequence[int], **own: Any) -> "Record":
        """Return the record of a request that was answered."""
        return cls(
            ttft_ms=round(outcome.ttft_ms, 3),
            tpot_ms=round(outcome.tpot_ms, 3),
            latency_ms=round(outcome.latency_ms, 3),
            input_num_tokens=outcome.input_num_tokens,
            output_num_tokens=outcome.output_num_tokens,
            verdict=outcome.verdict,
            reason=outcome.reason,
            retried=outcome.retried,
            retokenized=outcome.retokenized,
            finish_reason=outcome.finish_reason,
            tokens=outcome.tokens,
            prefill_ms=round(outcome.prefill_ms, 3),
            transfer_ms=round(outcome.readback.duration_ms, 3),
            bytes=outcome.readback.bytes,
            descriptors=outcome.readback.descriptors,
            handoff_ms=round(outcome.handoff.duration_ms, 3),
            handoff_bytes=outcome.handoff.bytes,
            handoff_descriptors=outcome.handoff.descriptors,
            prompt_digest=digest(prompt),
            answer_digest=digest(outcome.token_ids),
            **own,
        )


class RecordFile:
    """Appends records; each is on disk before the next request begins, so that an ended run keeps them."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("w", encoding="utf-8")
        self.records: list[Record] = []

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._stream.close()

    def add(self, record: Record) -> None:
        """Write one record."""
        self.records.append(record)
        self._stream.write(json.dumps(asdict(record)) + "\n")
        self._stream.flush()


def read(place: Path) -> list[Record]:
    """Return the records of a file, or of the folder of a run. Raises BadRecords."""
    file = place / REQUESTS if place.is_dir() else place
    known = {one.name for one in fields(Record)}
    records: list[Record] = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        for line in lines:
            value = json.loads(line)
            records.append(Record(**{name: value[name] for name in value if name in known}))
    except OSError as error:
        raise BadRecords(f"{file}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise BadRecords(f"{file}, line {len(records) + 1}: {error}") from None
    return records


def keep_record(out: Path, record: Mapping[str, Any]) -> None:
    """Write a whole run's record in one go: whoever ends the run finds the one before or this one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    half = out.with_name(f"{out.name}.part")
    half.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    half.replace(out)


def digest(token_ids: Iterable[int]) -> str:
    """Return a short name of token ids."""
    return hashlib.blake2b(tokens.pack(list(token_ids)), digest_size=8).hexdigest()
