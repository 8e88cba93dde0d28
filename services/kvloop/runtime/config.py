"""Settings of a process: flags, then KVLOOP_* environment, then a YAML file, then defaults."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvloop.runtime import endpoints

ENV_PREFIX = "KVLOOP_"


class ConfigError(Exception):
    """Settings that contradict or don't parse; the text says what to change."""


class _Environment(EnvSettingsSource):
    """KVLOOP_*: lists as JSON or separated by commas, mappings as JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Return the value of a list or mapping. Raises ConfigError."""
        text = str(value).strip()
        if get_origin(field.annotation) in (tuple, list) and not text.startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"{field_name}: {ENV_PREFIX}{field_name.upper()} is not JSON") from None


class Settings(BaseSettings):
    """Base of every process's settings. Unknown names are refused, in files and flags alike."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave dotenv files and secret folders out, and read lists as flags do."""
        return init_settings, _Environment(settings_cls)

    @classmethod
    def load(cls, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Self:
        """Return settings from flags (None = not given), environment and a YAML file, in this order.

        Raises ConfigError.
        """
        values = _from_file(file) if file is not None else {}
        for name in cls.model_fields:
            # Environment stands above the file, so a name set there is left to its source.
            if name.upper() in variables():
                values.pop(name, None)
        values |= {name: value for name, value in (flags or {}).items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_sentences(error)) from None


class TracedSettings(Settings):
    """What every process may be told about traces. They are off by default."""

    trace_file: Path | None = None
    """Traces as JSON lines in this file; needs the otel extra."""
    trace_otlp_url: str = ""
    """Traces to an OTLP collector, http://host:4317 for gRPC; needs the otel extra."""
    trace_share: float = Field(1.0, ge=0, le=1)
    """Share of turns traced that no caller has decided about."""


class ObservedSettings(TracedSettings):
    """What routers and workers may be told about being watched. Everything is off by default."""

    metrics_listen: str = ""
    """host:port of /metrics, /livez and /readyz over HTTP; absent: none."""
    metrics_open: bool = False
    """Lets metrics_listen be reached from other hosts."""

    @model_validator(mode="after")
    def _refuse_open_metrics(self) -> Self:
        if not self.metrics_listen:
            return self
        try:
            at = endpoints.parse(self.metrics_listen)
        except ValueError as error:
            raise ValueError(f"metrics_listen: {error}") from None
        if not (at.is_loopback or self.metrics_open):
            raise ValueError(
                f"metrics_listen {self.metrics_listen} is open to other hosts; set metrics_open,"
                " or listen on 127.0.0.1"
            )
        return self


def variables() -> set[str]:
    """Return the names of KVLOOP_* in the environment that are set to something, without the prefix."""
    names = {name.upper() for name, value in os.environ.items() if value}
    return {name.removeprefix(ENV_PREFIX) for name in names if name.startswith(ENV_PREFIX)}


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of setting names to values")
    return values


def _sentences(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        name = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = "no such setting; check the name"
        lines.append(f"{name}: {text}" if name else text)
    return "\n".join(lines)
