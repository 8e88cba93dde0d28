"""Certificates that are renewed while a server runs."""

import shutil
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop.cli import certs
from kvloop.runtime.renewal import CertificateFiles
from kvloop.runtime.security import SecuredSettings, Security
from kvloop.runtime.server import GrpcServer


def settings(folder: Path, role: str) -> SecuredSettings:
    return SecuredSettings(
        tls_cert=folder / f"{role}.crt", tls_key=folder / f"{role}.key", tls_ca=folder / "ca.crt"
    )


def take_over(folder: Path, other: Path, *names: str) -> None:
    for name in names:
        shutil.copy(other / name, folder / name)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Return two folders of certificates, each of an authority of its own."""
    for name in ("old", "new"):
        certs.make(tmp_path / name, list(certs.HOSTS), 1)
    return tmp_path / "old", tmp_path / "new"


async def test_a_running_server_takes_a_new_certificate_and_authority(two: tuple[Path, Path]) -> None:
    old, new = two
    served = old.parent / "served"
    shutil.copytree(old, served)
    server = GrpcServer([], Security.load(settings(served, "decode")), for_peers=True)
    port = await server.start("127.0.0.1:0")

    async def answers(folder: Path) -> bool:
        async with Security.load(settings(folder, "router")).channel(f"127.0.0.1:{port}") as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNAVAILABLE
            return True

    try:
        async with Security.load(settings(old, "router")).channel(f"127.0.0.1:{port}") as kept:
            stub = health_pb2_grpc.HealthStub(kept)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert not await answers(new)
            take_over(served, new, "decode.crt", "decode.key", "ca.crt")
            assert await answers(new)
            assert not await answers(old)
            # What is open stays open.
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    finally:
        await server.stop(0)


def test_half_of_a_pair_is_left_for_later(two: tuple[Path, Path]) -> None:
    old, new = two
    files = CertificateFiles(old / "decode.crt", old / "decode.key", None)
    assert files.renewed() is None
    take_over(old, new, "decode.crt")
    assert files.renewed() is None
    take_over(old, new, "decode.key")
    found = files.renewed()
    assert found is not None
    assert found.key == (new / "decode.key").read_bytes()
    assert files.renewed() is None


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("no PEM")])
def test_files_that_are_no_certificates_change_nothing(two: tuple[Path, Path], spoil: object) -> None:
    old, _ = two
    files = CertificateFiles(old / "decode.crt", old / "decode.key", old / "ca.crt")
    assert callable(spoil)
    spoil(old / "decode.crt")
    assert files.renewed() is None
