"""Is this store fit for leases? A pure function of what INFO says."""

from collections.abc import Mapping, Sequence

from kvloop.metastore.port import Finding, FitnessReport, Level

MIN_VERSION = (6, 0)
FULL = 0.9


def report(nodes: Sequence[Mapping[str, str]]) -> FitnessReport:
    """Return the report of a store from the INFO of each of its primaries."""
    findings: dict[str, Finding] = {}

    def find(level: Level, text: str) -> None:
        findings.setdefault(text, Finding(level, text))

    policies: set[str] = set()
    limits: list[int] = []
    names: set[str] = set()
    for info in nodes:
        name, version = _product(info)
        names.add(f"{name} {version}")
        if name == "redis" and _version(version) < MIN_VERSION:
            find(Level.FAILURE, f"{name} {version} is too old: use 6.0 or newer")
        if info.get("role") not in {None, "master"}:
            find(Level.WARNING, "this is a replica and can't be written: point the URL at the primary")
        policy = str(info.get("maxmemory_policy", "unknown"))
        policies.add(policy)
        limit = _number(info, "maxmemory")
        limits.append(limit)
        if limit == 0:
            find(Level.NOTE, "maxmemory is not set: the store may grow until the host has no memory left")
        else:
            if policy.startswith("allkeys-"):
                find(
                    Level.WARNING,
                    f"maxmemory-policy {policy} evicts leases that are still held, and workers: "
                    "set volatile-ttl",
                )
            elif policy == "noeviction":
                find(
                    Level.WARNING,
                    "maxmemory-policy noeviction refuses new leases when memory is full: set volatile-ttl",
                )
            if _number(info, "used_memory") > FULL * limit:
                find(Level.WARNING, f"more than {FULL:.0%} of maxmemory is in use: raise it")
    return FitnessReport(
        server=", ".join(sorted(names)) or "unknown",
        nodes=len(nodes),
        eviction_policy=", ".join(sorted(policies)) or "unknown",
        maxmemory_bytes=min(limits, default=0),
        findings=tuple(findings.values()),
    )


def _product(info: Mapping[str, str]) -> tuple[str, str]:
    if "valkey_version" in info:
        return "valkey", str(info["valkey_version"])
    return "redis", str(info.get("redis_version", "0"))


def _number(info: Mapping[str, str], name: str) -> int:
    text = info.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
