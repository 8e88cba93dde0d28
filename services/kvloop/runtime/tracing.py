"""Traces: one per turn, across router, prefill, decode and directory. Facts about reuse, never content.

Off, which is the default, nothing of OpenTelemetry is imported and a span is one shared object that does
nothing. On, a turn's root span starts at the router, or goes on where the caller's traceparent says. Other
spans exist only below one: questions that nobody's turn asked (facts of workers, say) leave no trace.

One tracer per process; several apps in one process, as in tests, share the first one's.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvloop.runtime.config import ConfigError, TracedSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

STOP_S = 5.0

Fact = str | bool | int | float
Metadata = Iterable[tuple[str, str | bytes]]


class Span(Protocol):
    """What the code under a span may do with it."""

    def note(self, **facts: Fact) -> None:
        """Add facts. Never prompts, tokens, texts or handles."""
        ...


class _NoSpan:
    """Stands for spans that are not recorded; its own context manager, so that nothing is made."""

    def note(self, **facts: Fact) -> None:
        """Forget the facts."""

    def __enter__(self) -> "_NoSpan":
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN = _NoSpan()


class _Nothing:
    """What an app holds that does not trace."""

    async def stop(self) -> None:
        """Do nothing."""


NOTHING = _Nothing()


class _Tracer(_Nothing):
    """OpenTelemetry, set up for this process."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.users = 0
        self._provider = provider
        self._tracer = provider.get_tracer("kvloop")
        self._context = context
        self._trace = trace
        self._wire = TraceContextTextMapPropagator()

    async def stop(self) -> None:
        """Send what is left, once the last app that traces has ended."""
        global _active  # noqa: PLW0603 - one tracer per process
        self.users -= 1
        if self.users == 0:
            _active = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.to_thread(self._provider.shutdown)

    def is_recording(self) -> bool:
        """Tell whether a span is current, here or at the caller."""
        return bool(self._trace.get_current_span().get_span_context().trace_flags.sampled)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """Record a span. Exceptions are told by their type alone: their texts may hold more."""
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield _Recorded(span)
            except BaseException as error:
                span.set_attribute("kvloop.error", type(error).__name__)
                if isinstance(error, Exception):
                    span.set_status(self._trace.StatusCode.ERROR)
                raise

    @contextlib.contextmanager
    def continued(self, metadata: Metadata | None) -> Iterator[None]:
        """Let spans begun inside be children of the caller's, when it sent one."""
        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        token = self._context.attach(self._wire.extract(carrier))
        try:
            yield
        finally:
            self._context.detach(token)

    def outgoing(self) -> tuple[tuple[str, str], ...]:
        """Return the current span as metadata."""
        carrier: dict[str, str] = {}
        self._wire.inject(carrier)
        return tuple(carrier.items())

    def note(self, facts: dict[str, Fact]) -> None:
        """Add facts to the current span."""
        _Recorded(self._trace.get_current_span()).note(**facts)


class _Recorded:
    def __init__(self, span: Any) -> None:
        self._span = span

    def note(self, **facts: Fact) -> None:
        self._span.set_attributes({f"kvloop.{name}": value for name, value in facts.items()})


_active: _Tracer | None = None


def span(name: str, *, root: bool = False) -> contextlib.AbstractContextManager[Span]:
    """Return a span to do something in; root: also where there is none above."""
    if _active is None or not (root or _active.is_recording()):
        return _NO_SPAN
    return _active.span(name)


def note(**facts: Fact) -> None:
    """Add facts to the current span, if there is one."""
    if _active is not None:
        _active.note(facts)


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Return the metadata that lets a peer go on with the trace; None without one."""
    return _active.outgoing() if _active is not None and _active.is_recording() else None


def continued(metadata: Metadata | None) -> contextlib.AbstractContextManager[Any]:
    """Let spans begun inside belong to the caller's trace. No yield of a generator may be inside."""
    return _NO_SPAN if _active is None else _active.continued(metadata)


@contextlib.contextmanager
def _serving(tracer: _Tracer, name: str, metadata: Metadata | None) -> Iterator[None]:
    with tracer.continued(metadata), span(f"rpc.{name}"):
        yield


def serving(name: str, metadata: Metadata | None) -> contextlib.AbstractContextManager[Any]:
    """Span a call that is served, when the caller traces."""
    return _NO_SPAN if _active is None else _serving(_active, name, metadata)


def on() -> bool:
    """Tell whether this process traces."""
    return _active is not None


def configure(settings: TracedSettings, process: str) -> _Nothing:
    """Begin to trace if the settings say so; the caller stops what is returned. Raises ConfigError."""
    global _active  # noqa: PLW0603 - one tracer per process
    if settings.trace_file is None and not settings.trace_otlp_url:
        return NOTHING
    if _active is None:
        try:
            _active = _Tracer(_provider(settings, process))
        except ImportError:
            raise ConfigError(
                "trace_file and trace_otlp_url need OpenTelemetry; install kvloop[otel]"
            ) from None
    _active.users += 1
    return _active


def _provider(settings: TracedSettings, process: str) -> "TracerProvider":
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        resource=Resource.create({"service.name": f"kvloop-{process}"}),
        sampler=ParentBasedTraceIdRatio(settings.trace_share),
        shutdown_on_exit=False,
    )
    if settings.trace_file is not None:
        provider.add_span_processor(BatchSpanProcessor(_file_exporter(settings.trace_file)))
    if settings.trace_otlp_url:
        provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(settings.trace_otlp_url)))
    return provider


def _otlp_exporter(url: str) -> Any:
    if url.partition("://")[2].partition("/")[2]:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=url)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    return Grpc(endpoint=url, insecure=url.startswith("http://"))


def _file_exporter(file: Path) -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class JsonLines(SpanExporter):  # type: ignore[misc]  # without the extra, its base is unknown
        """One JSON object per span; processes may share the file."""

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            lines = "".join(json.dumps(_as_json(span)) + "\n" for span in spans)
            try:
                # One write in append mode: lines of several processes don't mix.
                with file.open("a", encoding="utf-8") as out:
                    out.write(lines)
            except OSError:
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

    try:
        file.touch()
    except OSError as error:
        raise ConfigError(f"trace_file: {error}") from None
    return JsonLines()


def _as_json(span: "ReadableSpan") -> dict[str, Any]:
    context = span.get_span_context()
    start, end = span.start_time or 0, span.end_time or 0
    assert context is not None
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent is not None else None,
        "service": span.resource.attributes.get("service.name"),
        "name": span.name,
        "start_us": start // 1000,
        "duration_ms": round((end - start) / 1e6, 3),
        "status": span.status.status_code.name.lower(),
        "facts": dict(span.attributes or {}),
    }
