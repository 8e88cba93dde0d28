"""What can be reached from here: workers, their engines' side channels, the store, the router."""

import asyncio
from collections.abc import Sequence

import grpc

from kvloop.cli.client import spoken
from kvloop.cli.doctor.findings import Finding, fail, ok, warn
from kvloop.cli.doctor.workers import Seen, left_at_loopback
from kvloop.cli.errors import CommandFailed
from kvloop.client import Client
from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.metastore.port import DirectoryUnavailable, FitnessReport, Level
from kvloop.runtime import endpoints
from kvloop.runtime.security import from_environment
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)

CALL_S = 10.0
CONNECT_S = 3.0
STORE_S = 2.0
_SEE_WORKERS = "see prefill-workers and decode-workers"


async def ask(role: str, endpoint: str) -> Seen:
    """Return a worker with its facts, if it tells them."""
    try:
        async with from_environment().channel(endpoint) as channel:
            if role == "prefill":
                prefill = prefill_service_pb2_grpc.PrefillServiceStub(channel)
                asked = prefill_service_pb2.PrefillServiceGetInfoRequest()
                return Seen(role, endpoint, (await prefill.GetInfo(asked, timeout=CALL_S)).info)
            decode = decode_service_pb2_grpc.DecodeServiceStub(channel)
            request = decode_service_pb2.DecodeServiceGetInfoRequest()
            return Seen(role, endpoint, (await decode.GetInfo(request, timeout=CALL_S)).info)
    except grpc.aio.AioRpcError:
        return Seen(role, endpoint, None)


async def check_side_channels(workers: Sequence[Seen]) -> Finding:
    """Tell whether peers can begin reads."""
    name = "side-channel"
    mistaken = [worker.name for worker in workers if left_at_loopback(worker)]
    if mistaken:
        return fail(
            name,
            f"the side channel of {', '.join(mistaken)} is on loopback, where peers on other hosts can't "
            "reach it",
            "set nixl_side_channel_host to an address of the worker's own host",
        )
    if all(worker.info is None for worker in workers):
        return warn(name, "no worker answers, so none was tried", _SEE_WORKERS)
    known = [(w, w.info.side_channel) for w in workers if w.info is not None and w.info.side_channel]
    reached = await asyncio.gather(*(_connects(at) for _, at in known))
    silent = [f"{worker.name} ({at})" for (worker, at), up in zip(known, reached, strict=True) if not up]
    if silent:
        return fail(
            name,
            f"nothing listens at the side channel of {', '.join(silent)}, as seen from here",
            "open the port between prefill and decode hosts; set nixl_side_channel_port to a fixed one",
        )
    return ok(name, f"{len(known)} reached from here" if known else "the engines have none")


async def _connects(text: str) -> bool:
    try:
        at = endpoints.parse(text)
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(at.host, at.port)
        writer.close()
        await writer.wait_closed()
    except (OSError, ValueError, TimeoutError):
        return False
    return True


def open_patient_store(url: str) -> Store:
    """Return a store with more patience than a turn has. Raises CommandFailed for a URL without sense."""
    try:
        return open_store(url, options=StoreOptions(deadline_s=STORE_S, connect_s=STORE_S))
    except ValueError as error:
        raise CommandFailed(f"--store: {error}") from None


async def check_store(store: Store) -> list[Finding]:
    """Tell whether the store answers and is fit for leases."""
    if store.link is None:
        return [
            fail(
                "store",
                "memory:// is a store of each process's own: nobody finds anybody's leases",
                "set directory_url to the same redis:// URL on routers and workers",
            )
        ]
    try:
        report = await store.directory.check()
    except DirectoryUnavailable as error:
        return [
            fail(
                "store",
                f"the store can't be used ({error.outage}): every turn goes cold",
                "start it, or correct directory_url, its password and its access rules",
            )
        ]
    return judge(report)


def judge(report: FitnessReport) -> list[Finding]:
    """Return the findings of a store's own report."""
    told = [f for f in report.findings if f.level is not Level.NOTE]
    if not told:
        return [ok("store", f"{report.server}, {report.eviction_policy}")]
    findings = []
    for finding in told:
        text, _, remedy = finding.text.partition(": ")
        make = fail if finding.level is Level.FAILURE else warn
        findings.append(make("store", text, remedy or "see docs"))
    return findings


async def check_registry(store: Store, workers: Sequence[Seen]) -> Finding:
    """Tell whether the workers use this very store."""
    name = "registry"
    try:
        registered = {worker.epoch for worker in (await store.registry.workers()).values()}
    except DirectoryUnavailable:
        return warn(name, "the store did not tell which workers use it", "see the finding on the store")
    if all(worker.info is None for worker in workers):
        text = f"{len(registered)} workers registered, but none answers that could be one of them"
        return warn(name, text, _SEE_WORKERS)
    strangers = [w.name for w in workers if w.info is not None and w.info.epoch not in registered]
    if strangers:
        return fail(
            name,
            f"{', '.join(strangers)} answer, but this store does not know them: their leases are elsewhere",
            "set the same directory_url on routers and workers",
        )
    return ok(name, f"{len(registered)} workers registered")


async def check_router(client: Client, endpoint: str) -> Finding:
    """Tell whether the router answers and takes the credentials."""
    try:
        with spoken():
            await client.get("kvloop-doctor-no-such-conversation")
    except CommandFailed as error:
        text, _, remedy = str(error).partition("; ")
        return fail("router", text, remedy or "look at the router's log and at its workers")
    return ok("router", f"answers at {endpoint}")
