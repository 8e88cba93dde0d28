"""What a fleet consists of, and the settings files its parts are started with."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvloop.cli import options
from kvloop.cli.serve import ROLES
from kvloop.runtime.config import ENV_PREFIX, ConfigError

STORE = "store"

Values = Mapping[str, Any]
"""Settings by name, nested ones by their own name alone (block_size, not engine.block_size)."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet: one mapping of settings per process. Where a mapping names no port, a free one is taken."""

    prefill: Sequence[Values] = ({},)
    decode: Sequence[Values] = ({},)
    routers: Sequence[Values] = ({},)
    gateways: Sequence[Values] = ()
    workers: Values = field(default_factory=dict)
    """Settings of all prefill and decode processes, below their own."""
    store_url: str | None = None
    """redis:// URL of a store that is there already; None starts one."""
    store_port: int = 0
    ready_timeout_s: float = 300.0
    environment: Values = field(default_factory=dict)
    """Added to the environment of every part."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of every process by part name, in the order of starting."""
        named: dict[str, dict[str, Any]] = {}
        roles: tuple[tuple[str, Sequence[Values], Values], ...] = (
            ("prefill", self.prefill, self.workers),
            ("decode", self.decode, self.workers),
            ("router", self.routers, {}),
            ("gateway", self.gateways, {}),
        )
        for role, entries, common in roles:
            for index, entry in enumerate(entries):
                named[f"{role}-{index}"] = {**common, **entry}
        return named


def read_values(file: Path | None) -> dict[str, Any]:
    """Return the settings of a YAML file by name, nested ones by their own name. Raises ConfigError."""
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of setting names to values")
    return values


def role_of(name: str) -> str:
    """Return the role of a part, from its name."""
    return name.rpartition("-")[0]


def is_router(name: str) -> bool:
    """Tell whether a part is a router."""
    return role_of(name) == "router"


def is_gateway(name: str) -> bool:
    """Tell whether a part is a gateway."""
    return role_of(name) == "gateway"


class SettingsFiles:
    """Writes one YAML file of settings per part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Routers of one fleet reach the same leases only under one secret.
        self._fleet_secret = secrets.token_hex(32)

    def write(self, name: str, values: Values, links: Values) -> Path:
        """Write a part's settings and return the file. links are taken where the role knows such a setting.

        Raises ConfigError for settings that the role does not know or refuses.
        """
        file = self._folder / f"{name}.yaml"
        file.touch(mode=0o600)
        file.write_text(yaml.safe_dump(self._checked(name, values, links)), encoding="utf-8")
        return file

    def check(self, name: str, values: Values, links: Values) -> None:
        """Raise the ConfigError that write would raise."""
        self._checked(name, values, links)

    def _checked(self, name: str, values: Values, links: Values) -> dict[str, Any]:
        role = role_of(name)
        model = ROLES[role].load_settings()
        made = options.options_of(model)
        known = {option.parameter for option in made}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(f"{name}: no such setting: {', '.join(unknown)}")
        own: dict[str, Any] = {"fleet_secret": self._fleet_secret} if role == "router" else {}
        wanted = {**own, **links}
        merged = {**{key: value for key, value in wanted.items() if key in known}, **values}
        if "fleet_secret_file" in values:
            merged.pop("fleet_secret", None)
        nested = options.nest(made, {key: _plain(value) for key, value in merged.items()})
        try:
            model.load(flags=nested)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        return nested


def part_environment(extra: Values, settings_names: Sequence[str]) -> dict[str, str]:
    """Return the environment of a part: ours, less KVLOOP_ names that would override its file."""
    hidden = {ENV_PREFIX + name.upper() for name in settings_names}
    inherited = {key: value for key, value in os.environ.items() if key.upper() not in hidden}
    return {**inherited, "PYTHONUNBUFFERED": "1", **{key: str(value) for key, value in extra.items()}}


def _plain(value: Any) -> Any:
    """Return a value as YAML has it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | set | frozenset):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value
