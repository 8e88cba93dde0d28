"""Worker tokens on streams that stay open: exchanged without a gap, and of no use once withdrawn."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_sim import until_async

from kvloop.cli import certs
from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.prefill.app import PrefillApp
from kvloop.prefill.settings import PrefillSettings
from kvloop.router.legs import DecodeLink, LegFailed, PrefillLink
from kvloop.runtime.security import GuardedSettings, Security
from kvloop.v1alpha1 import decode_service_pb2, prefill_service_pb2

OLD, NEW = "the former token of workers", "the next token of workers"
APPS: dict[str, Any] = {"prefill": (PrefillApp, PrefillSettings), "decode": (DecodeApp, DecodeSettings)}


def secured(folder: Path, role: str, tokens: str) -> dict[str, str]:
    (folder / f"{tokens}.token").write_text(f"{OLD}\n{NEW}\n")
    return {
        "tls_cert": str(folder / f"{role}.crt"),
        "tls_key": str(folder / f"{role}.key"),
        "tls_ca": str(folder / "ca.crt"),
        "worker_token_file": str(folder / f"{tokens}.token"),
    }


def security_of(folder: Path, tokens: str) -> Security:
    return Security.load(GuardedSettings.model_validate(secured(folder, "router", tokens)))


class Attached:
    """A router's link to a worker, by its stream."""

    def __init__(self, role: str, endpoint: str, security: Security) -> None:
        self.endpoint, self.security = endpoint, security
        self._link = (PrefillLink if role == "prefill" else DecodeLink)(endpoint, security)

    async def reason(self) -> str:
        """Return why the worker refuses an empty request."""
        try:
            if isinstance(self._link, PrefillLink):
                await self._link.prefill(prefill_service_pb2.PrefillRequest(), b"", 10.0)
            else:
                await self._link.decode(decode_service_pb2.DecodeRequest(), b"", 10.0, lambda raw: None)
        except LegFailed as failed:
            return failed.failure.reason_name
        raise AssertionError("an empty request was served")

    async def learn(self) -> None:
        """Ask for the worker's facts, which tell that it has the stream."""
        assert (await self._link.info(10.0)).attach

    async def close(self) -> None:
        await self._link.close()


@asynccontextmanager
async def attached(role: str, folder: Path) -> AsyncIterator[Attached]:
    certs.make(folder, list(certs.HOSTS), 1)
    app_of, settings_of = APPS[role]
    flags = {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0.0} | secured(
        folder, role, role
    )
    async with AsyncExitStack() as stack:
        app = app_of(settings_of.load(flags=flags))
        stack.push_async_callback(app.stop)
        await app.start()
        link = Attached(role, app.endpoint, security_of(folder, "router"))
        stack.push_async_callback(link.close)
        await link.learn()
        yield link


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_token_that_is_withdrawn_opens_no_call_on_a_stream_that_it_opened(
    role: str, tmp_path: Path
) -> None:
    async with attached(role, tmp_path) as link:
        assert await link.reason() == "INVALID_FIELD"
        (tmp_path / f"{role}.token").write_text(f"{NEW}\n")

        async def refused() -> bool:
            return await link.reason() == "UNAUTHENTICATED"

        await until_async(refused, "the end of the token")


async def test_a_token_is_exchanged_under_a_stream_without_a_gap(tmp_path: Path) -> None:
    async with attached("decode", tmp_path) as link:
        assert await link.reason() == "INVALID_FIELD"
        (tmp_path / "router.token").write_text(f"{NEW}\n")

        async def shown() -> bool:
            return link.security.shown_token() == NEW

        await until_async(shown, "the next token")
        assert await link.reason() == "INVALID_FIELD"
        (tmp_path / "decode.token").write_text(f"{NEW}\n")
        former = Attached("decode", link.endpoint, security_of(tmp_path, "former"))

        async def refused() -> bool:
            return await former.reason() == "UNAUTHENTICATED"

        await until_async(refused, "the end of the former token")
        await former.close()
        assert await link.reason() == "INVALID_FIELD"
