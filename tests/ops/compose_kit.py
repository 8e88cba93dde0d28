"""compose.yaml without a container engine: its services as plain processes with its commands and environment.

Each service gets a loopback address of its own in place of its name, so ports stay as they are; what is
mounted is copied with the same substitution. Nothing else is changed.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvloop.metastore.embedded import valkey_binary

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
# Debian has no valkey-cli; Redis' own speaks the same protocol.
PROGRAMS = {"valkey-server": str(valkey_binary()), "valkey-cli": "redis-cli"}
# What images that are not ours put before a command (their ENTRYPOINT); a script that runs the command as it
# is counts as nothing.
ENTRY_POINTS: dict[str, list[str]] = {
    "valkey/valkey": [],
    "haproxy": [],
    "prom/prometheus": ["prometheus"],
    "grafana/grafana-oss": ["/run.sh"],
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def load(file: Path, values: Mapping[str, str]) -> dict[str, Any]:
    """Return a compose file with ${NAME:-default} filled in."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(part) for name, part in value.items()}
        if isinstance(value, list):
            return [fill(part) for part in value]
        if not isinstance(value, str):
            return value
        return _VARIABLE.sub(lambda found: values.get(found[1]) or found[2] or "", value)

    filled: dict[str, Any] = fill(yaml.safe_load(file.read_text(encoding="utf-8")))
    return filled


def services(document: Mapping[str, Any], *profiles: str) -> dict[str, dict[str, Any]]:
    """Return the services that run under profiles."""
    return {
        name: service
        for name, service in document["services"].items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }


@dataclass
class Container:
    """A service as a process."""

    name: str
    command: list[str]
    health: list[str]
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log, cwd=self.log.parent
            )

    def healthy(self) -> bool:
        """Run the health check once, of a process that must be there."""
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text()[-2000:]}"
        return self.check()

    def check(self) -> bool:
        """Run the health check once; one that takes too long has failed."""
        try:
            done = subprocess.run(
                self.health, env=self.environment, capture_output=True, check=False, timeout=30
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Plain:
    """The services of one profile on loopback addresses."""

    folder: Path
    variables: Mapping[str, str]
    extra: Mapping[str, str]
    """Environment added to every service."""
    profile: str = "cpu"
    names: Sequence[str] = ()
    """Services that run; all when empty."""
    containers: dict[str, Container] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._document = load(COMPOSE, self.variables)
        found = services(self._document, self.profile)
        prefix = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self.hosts = {name: f"{prefix}.{index + 1}" for index, name in enumerate(found)}
        self._services = {name: found[name] for name in self.names or found}
        for name, service in self._services.items():
            self.containers[name] = self._container(name, service)

    def start(self, *names: str) -> None:
        """Start services and wait for their health checks."""
        for name in names:
            self.containers[name].start()
        limit = time.monotonic() + 200
        for name in names:
            while not self.containers[name].healthy():
                assert time.monotonic() < limit, (
                    f"{name} was never healthy:\n{self.containers[name].log.read_text()[-2000:]}"
                )

    def stop(self) -> dict[str, int]:
        """End all that run, last started first; return exit codes."""
        running = [c for c in reversed(self.containers.values()) if c.process is not None]
        return {container.name: container.stop() for container in running}

    def _container(self, name: str, service: Mapping[str, Any]) -> Container:
        folder = self.folder / name
        folder.mkdir()
        places = self._mounts(folder, service)

        def here(text: str) -> str:
            for inside, outside in places.items():
                text = re.sub(rf"(?<![\w.]){re.escape(inside)}(?![\w])", str(outside), text)
            return self._rehost(name, text)

        for inside, outside in places.items():
            if outside.is_relative_to(self.folder) and not inside.startswith("/run/secrets"):
                for file in [outside] if outside.is_file() else outside.rglob("*"):
                    if file.is_file():
                        file.write_text(here(file.read_text(encoding="utf-8")), encoding="utf-8")
        environment = service.get("environment", {})
        # A name alone is a host only where a setting says so.
        own = {k: self.hosts[v] if k.endswith("_HOST") else here(str(v)) for k, v in environment.items()}
        own = {key: value for key, value in own.items() if value}
        path = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
        inherited = {k: v for k, v in os.environ.items() if k in {"PYTHONPATH", "HOME", "LANG"}}
        image = service["image"].partition(":")[0]
        entry = ["kvloop"] if "build" in service else ENTRY_POINTS[image]
        program, *arguments = [*entry, *service["command"]]
        test = service["healthcheck"]["test"]
        assert test[0] == "CMD"
        return Container(
            name,
            [PROGRAMS.get(program, program), *(here(part) for part in arguments)],
            [PROGRAMS.get(test[1], test[1]), *(here(part) for part in test[2:])],
            {**inherited, "PATH": path, **own, **self.extra},
            folder / "log",
        )

    def _mounts(self, folder: Path, service: Mapping[str, Any]) -> dict[str, Path]:
        """Return where what a service sees is here; files of the project are copied."""
        places: dict[str, Path] = {}
        for volume in service.get("volumes", ()):
            source, inside = volume.split(":")[:2]
            if source.startswith("/"):
                places[inside] = Path(source)
            elif source.startswith("./"):
                places[inside] = folder / Path(source).name
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, places[inside])
            else:
                places[inside] = folder / "volumes" / source
                places[inside].mkdir(parents=True)
        for secret in service.get("secrets", ()):
            file = ROOT / self._document["secrets"][secret]["file"]
            places[f"/run/secrets/{secret}"] = self.folder / "secrets" / file.name
        return places

    def _rehost(self, name: str, text: str) -> str:
        text = text.replace("0.0.0.0", self.hosts[name]).replace("127.0.0.1", self.hosts[name])
        names = "|".join(map(re.escape, sorted(self.hosts, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({names})(?=:\d)", lambda found: self.hosts[found[1]], text)
