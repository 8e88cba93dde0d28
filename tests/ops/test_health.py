"""`kvloop health`: what a container's health check is told."""

import asyncio

import pytest
from router_sim import sim_fleet
from typer.testing import CliRunner

from kvloop.cli.main import app


async def health(*arguments: str) -> tuple[int, str]:
    """Return exit code and output."""
    done = await asyncio.to_thread(CliRunner().invoke, app, ["health", "--timeout", "20", *arguments])
    return done.exit_code, done.output


async def test_readiness_goes_with_a_drain_and_liveness_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_METRICS_LISTEN", "127.0.0.1:0")
    async with sim_fleet() as fleet:
        app_ = await fleet.router()
        page = f"http://{app_.metrics_endpoint}/readyz"
        assert await health(app_.endpoint) == (0, "")
        assert await health(page) == (0, "")
        assert await health(fleet.decodes[0].endpoint) == (0, "")
        await app_.drain()
        assert await health(app_.endpoint) == (1, f"{app_.endpoint} is NOT_SERVING\n")
        assert await health(app_.endpoint, "--service", "liveness") == (0, "")
        assert await health(page) == (1, f"{page} answers 503\n")
        await app_.stop()
        code, said = await health(app_.endpoint)
        assert code == 1
        assert "does not answer (UNAVAILABLE)" in said
        code, said = await health(page)
        assert code == 1
        assert "does not answer" in said


async def test_a_service_of_another_name_is_not_known() -> None:
    async with sim_fleet() as fleet:
        code, said = await health(fleet.decodes[0].endpoint, "--service", "nobody")
    assert code == 1
    assert "NOT_FOUND" in said
