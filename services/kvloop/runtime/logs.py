"""Structured logs: one event name, then facts. Never prompts, tokens, texts or handles."""

import logging
import sys
from typing import Any

import structlog

# Names under which content could slip in; a processor drops them whatever the caller does.
FORBIDDEN = frozenset(
    {"prompt", "prompt_token_ids", "token_ids", "tokens_text", "text", "handle", "handle_json", "params_json"}
)


def _drop_content(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for name in FORBIDDEN & event.keys():
        event[name] = "(left out)"
    return event


def configure(level: str = "info", *, as_json: bool | None = None) -> None:
    """Set up logging of this process: JSON lines on stderr, or a readable form on a terminal."""
    render: list[structlog.typing.Processor]
    if as_json if as_json is not None else not sys.stderr.isatty():
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Not the default formatter: it prints local variables, and with them prompts and handles.
        render = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            _drop_content,
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a room."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(room=name)
    return logger
