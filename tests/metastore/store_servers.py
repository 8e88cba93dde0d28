"""Real stores on loopback, for tests: started with free ports, bound to this process, broken at will."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvloop.metastore.embedded import spawn_bound, valkey_binary
from kvloop.runtime.ports import free_port

WAIT_S = 30.0


def poll(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds; errors of the store count as not yet."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(RedisError, OSError):
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = WAIT_S) -> None:
    """Wait until an awaited condition holds."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain"
        await asyncio.sleep(0.005)


def debian_binary(name: str) -> str:
    """Return the path of one of Debian's servers; fails the test with what to install."""
    path = shutil.which(name)
    if path is None:
        raise AssertionError(
            f"{name} is missing: this test runs against Debian's servers; run `make debian`, or install the "
            "packages redis-server and redis-sentinel"
        )
    return path


@dataclass(frozen=True)
class Tls:
    """Files of a throw-away authority and a server certificate for 127.0.0.1 and ::1."""

    ca: Path
    certificate: Path
    key: Path


class Server:
    """One server process with its folder and port."""

    def __init__(
        self,
        binary: str,
        folder: Path,
        settings: Sequence[str] = (),
        *,
        name: str = "server",
        flags: Sequence[str] = (),
        tls: Tls | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.binary = binary
        self.folder = folder
        self.name = name
        self.settings = list(settings)
        self.flags = list(flags)
        self.tls = tls
        self.host = host
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def client(self) -> redis.Redis:
        """Return a plain client, without any password."""
        if self._client is None:
            secure: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(self.tls.ca)} if self.tls else {}
            self._client = redis.Redis(
                host=self.host, port=self.port, protocol=2, retry=Retry(NoBackoff(), 0), **secure
            )
        return self._client

    def start(self) -> "Server":
        port = "tls-port" if self.tls else "port"
        config = self.folder / f"{self.name}.conf"
        # Sentinel keeps its state in its file: it is written once.
        if not config.exists() or not self.flags:
            lines = [f"{port} {self.port}", f"bind {self.host}", f"dir {self.folder}", "daemonize no"]
            if "--sentinel" not in self.flags:
                lines += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
            if self.tls:
                lines += [
                    "port 0",
                    f"tls-cert-file {self.tls.certificate}",
                    f"tls-key-file {self.tls.key}",
                    f"tls-ca-cert-file {self.tls.ca}",
                    "tls-auth-clients no",
                ]
            config.write_text("\n".join([*lines, *self.settings]) + "\n")
        log = self.folder / f"{self.name}.log"
        self.process = spawn_bound([self.binary, str(config), *self.flags], self.folder, log)
        poll(self._ready, f"{self.name} to answer; its log ends: {self._tail(log)}")
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended: {self._tail(self.folder / f'{self.name}.log')}")
        try:
            return bool(self.client().ping())
        except redis.exceptions.AuthenticationError:
            return True

    @staticmethod
    def _tail(log: Path) -> str:
        return log.read_text(errors="replace")[-800:] if log.exists() else ""

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def restart_empty(self) -> None:
        """Kill and start on the same port, without data."""
        self.kill()
        self.start()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self.kill()


@dataclass
class Store:
    """A store as a test sees it: its URL, and the servers that hold keys."""

    kind: str
    url: str
    servers: list[Server]

    def primaries(self) -> list[redis.Redis]:
        """Return a client of every server that is a primary now."""
        found = []
        for server in self.servers:
            with contextlib.suppress(RedisError):
                if server.client().info("replication")["role"] == "master":
                    found.append(server.client())
        return found

    def owner(self, key: bytes) -> redis.Redis:
        """Return the client of the primary that has a key's slot."""
        clients = self.primaries()
        for client in clients:
            with contextlib.suppress(redis.exceptions.ResponseError):
                client.exists(key)
                return client
        raise AssertionError("no primary takes the key")

    def clear(self) -> None:
        for client in self.primaries():
            client.flushall()

    def keys_without_ttl(self) -> list[bytes]:
        """Return kvloop's keys that would stay for ever."""
        found: list[bytes] = []
        for client in self.primaries():
            found += [key for key in client.scan_iter(b"*", count=1000) if client.pttl(key) == -1]
        return found


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers in order; stop them in reverse."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield


@contextlib.contextmanager
def valkey(folder: Path, *settings: str) -> Iterator[Store]:
    server = Server(str(valkey_binary()), folder, settings, name="valkey")
    with running(server):
        yield Store("valkey", f"redis://{server.address}", [server])


@contextlib.contextmanager
def debian_redis(folder: Path, *settings: str, credentials: str = "") -> Iterator[Store]:
    server = Server(debian_binary("redis-server"), folder, settings, name="redis")
    with running(server):
        yield Store("redis", f"redis://{credentials}{server.address}", [server])


@contextlib.contextmanager
def tls_redis(folder: Path) -> Iterator[Store]:
    tls = authority(folder)
    server = Server(debian_binary("redis-server"), folder, name="tls", tls=tls)
    with running(server):
        yield Store("tls", f"rediss://{server.address}?ssl_ca_certs={tls.ca}", [server])


@contextlib.contextmanager
def sentinel(folder: Path) -> Iterator[Store]:
    """A primary, its replica, and three sentinels of which two must agree."""
    binary, sentinel_binary = debian_binary("redis-server"), debian_binary("redis-sentinel")
    primary = Server(binary, folder, name="primary")
    replica = Server(binary, folder, [f"replicaof 127.0.0.1 {primary.port}"], name="replica")
    watchers = [
        Server(
            sentinel_binary,
            folder,
            [
                f"sentinel monitor leases 127.0.0.1 {primary.port} 2",
                "sentinel down-after-milliseconds leases 500",
                "sentinel failover-timeout leases 3000",
            ],
            name=f"sentinel{number}",
            flags=["--sentinel"],
        )
        for number in range(3)
    ]
    with running(primary, replica, *watchers):
        for watcher in watchers:
            poll(
                lambda watcher=watcher: (
                    (state := watcher.client().execute_command("SENTINEL", "MASTER", "leases"))
                    and dict(zip(state[::2], state[1::2], strict=True)).get(b"num-other-sentinels") == b"2"
                    and dict(zip(state[::2], state[1::2], strict=True)).get(b"num-slaves") == b"1"
                ),
                "the sentinels to find each other and the replica",
            )
        poll(lambda: replica.client().info("replication")["master_link_status"] == "up", "the replica")
        hosts = ",".join(watcher.address for watcher in watchers)
        yield Store("sentinel", f"redis+sentinel://{hosts}/leases", [primary, replica])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Store]:
    """Three primaries that go on without each other."""
    binary = debian_binary("redis-server")
    nodes = [
        Server(
            binary,
            folder,
            [
                "cluster-enabled yes",
                f"cluster-config-file nodes{number}.conf",
                "cluster-node-timeout 2000",
                "cluster-require-full-coverage no",
                f"cluster-port {free_port()}",
            ],
            name=f"node{number}",
        )
        for number in range(3)
    ]
    with running(*nodes):
        borders = [0, 5461, 10923, 16384]
        for node, first, end in zip(nodes, borders, borders[1:], strict=False):
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            bus = node.settings[-1].split()[1]
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in nodes:
            poll(
                lambda node=node: (
                    node.client().cluster("info")["cluster_state"] == "ok"
                    and node.client().cluster("info")["cluster_slots_ok"] == "16384"
                    and node.client().cluster("info")["cluster_known_nodes"] == "3"
                ),
                "the cluster to form",
            )
        yield Store("cluster", "redis+cluster://" + ",".join(node.address for node in nodes), nodes)


def authority(folder: Path) -> Tls:
    """Write a certificate authority and a server certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def build(subject: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("test authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    addresses = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    ca = build("test authority", ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    leaf = build("store", key.public_key()).add_extension(
        x509.SubjectAlternativeName(addresses), critical=False
    )
    files = Tls(folder / "ca.pem", folder / "store.pem", folder / "store.key")
    pem = serialization.Encoding.PEM
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.certificate.write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )
    return files
