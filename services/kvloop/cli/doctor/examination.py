"""The order of checks, and what each needs of the others."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.cli.client import dial
from kvloop.cli.doctor import network, transport, workers
from kvloop.cli.doctor.findings import Finding, Status, warn
from kvloop.cli.doctor.live import check_live_read
from kvloop.cli.doctor.machine import Machine
from kvloop.cli.doctor.workers import Seen
from kvloop.client import ONCE
from kvloop.metastore.port import DirectoryUnavailable


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where everything is."""

    router: str
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    store: str = ""
    token: str | None = None


async def examine(deployment: Deployment, machine: Machine | None) -> list[Finding]:
    """Return all findings. machine: this host, when engines run on it."""
    store = network.open_patient_store(deployment.store) if deployment.store else None
    client = dial(deployment.router, deployment.token, ONCE)
    try:
        findings: list[Finding] = []
        prefill, decode = list(deployment.prefill), list(deployment.decode)
        if store is None:
            remedy = "name it with --store, or give a router's settings with --config"
            stored = [warn("store", "no store was named, so it was not looked at", remedy)]
        else:
            stored = await network.check_store(store)
            if not prefill and not decode:
                try:
                    registered = (await store.registry.workers()).values()
                except DirectoryUnavailable:
                    registered = {}.values()
                prefill = [worker.endpoint for worker in registered if worker.role == "prefill"]
                decode = [worker.endpoint for worker in registered if worker.role == "decode"]
        asked = [*(("prefill", at) for at in prefill), *(("decode", at) for at in decode)]
        seen = list(await asyncio.gather(*(network.ask(role, at) for role, at in asked)))
        if machine is not None:
            findings += check_machine(machine, seen)
        findings += workers.check_all(seen)
        findings.append(await network.check_side_channels(seen))
        findings += stored
        if store is not None and all(finding.status is not Status.FAIL for finding in stored):
            findings.append(await network.check_registry(store, seen))
        routed = await network.check_router(client, deployment.router)
        findings.append(routed)
        if routed.status is Status.OK:
            infos = [worker.info for worker in seen if worker.info is not None]
            gpus = machine.gpus if machine is not None else 0
            findings += await check_live_read(client, infos, gpus=gpus)
        return findings
    finally:
        await client.close()
        if store is not None:
            await store.close()


def check_machine(machine: Machine, seen: Sequence[Seen]) -> list[Finding]:
    """Return the findings about this host; none where only simulated engines run, which need nothing."""
    engines = {worker.info.engine for worker in seen if worker.info is not None}
    if engines == {"simulated"}:
        return []
    named = {name for worker in seen if worker.info is not None for name in worker.info.transfer_backends}
    backends = sorted(named) or [transport.UCX]
    findings = [transport.check_nixl(machine)]
    if machine.nixl_works:
        findings.append(transport.check_backends(machine, backends))
    findings.append(transport.check_transport(machine, backends))
    if machine.gpus and machine.infiniband:
        findings.append(transport.check_memlock(machine))
    return findings
