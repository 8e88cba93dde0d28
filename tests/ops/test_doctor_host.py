"""What the doctor makes of hosts, which are described rather than had, and of what a read moved."""

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_kit import vllm_worker

from kvloop.cli.doctor.examination import check_machine
from kvloop.cli.doctor.findings import Status
from kvloop.cli.doctor.live import judge, judge_layout
from kvloop.cli.doctor.machine import Machine, Rdma, efa_domains, rdma_devices
from kvloop.cli.doctor.workers import Seen
from kvloop.v1alpha1 import turn_pb2, worker_pb2

GOOD_GPU = Machine(
    nixl_version="1.4.1",
    nixl_works=True,
    nixl_plugins=("LIBFABRIC", "UCX"),
    gpus=8,
    infiniband=(Rdma("mlx5_0", (1,), accessible=True), Rdma("mlx5_1", (1,), accessible=True)),
    efa_domains=(),
)
GOOD_EFA = replace(
    GOOD_GPU,
    infiniband=tuple(Rdma(f"efa_{n}", (1,), accessible=True) for n in range(16)),
    efa_domains=tuple(f"rdmap{n}s0-rdm" for n in range(16)),
)
MACHINES = {
    "no nixl": (Machine(), "UCX", "nixl", "not installed", "install kvloop"),
    "nixl broken": (
        *(replace(GOOD_GPU, nixl_works=False), "UCX", "nixl"),
        *("no agent can be made", "install what it misses"),
    ),
    "no plugin": (
        *(replace(GOOD_EFA, nixl_plugins=("UCX",)), "LIBFABRIC", "nixl-backends"),
        *("no plugin LIBFABRIC", "install a NIXL with that plugin"),
    ),
    "UCX told to use TCP": (
        *(replace(GOOD_GPU, environment={"UCX_TLS": "tcp,self"}), "UCX", "transport"),
        *("silently", "unset UCX_TLS"),
    ),
    "UCX told to leave RDMA and NVLink out": (
        *(replace(GOOD_GPU, environment={"UCX_TLS": "^ib,cuda_ipc,cuda"}), "UCX", "transport"),
        *("nothing but TCP", "unset UCX_TLS"),
    ),
    "UCX told to leave RDMA out": (
        *(replace(GOOD_GPU, environment={"UCX_TLS": "^rc,ud,dc,srd"}), "UCX", "transport"),
        *("has no RDMA", "add rc"),
    ),
    "UCX with NVLink alone": (
        *(replace(GOOD_GPU, environment={"UCX_TLS": "cuda_ipc,tcp"}), "UCX", "transport"),
        *("has no RDMA", "add rc"),
    ),
    "UCX told to use another network": (
        *(replace(GOOD_GPU, environment={"UCX_NET_DEVICES": "eth0"}), "UCX", "transport"),
        *("names none of mlx5_0, mlx5_1", "mlx5_0:1"),
    ),
    "UCX told to use another port": (
        *(replace(GOOD_GPU, environment={"UCX_NET_DEVICES": "mlx5_0:2"}), "UCX", "transport"),
        *("names none of mlx5_0, mlx5_1", "mlx5_0:1"),
    ),
    "a container without the devices": (
        *(replace(GOOD_GPU, infiniband=(Rdma("mlx5_0", (1,)),)), "UCX", "transport"),
        *("can't be opened", "rdma/hca"),
    ),
    "no cable": (
        *(replace(GOOD_GPU, infiniband=(Rdma("mlx5_0", (), accessible=True),)), "UCX", "transport"),
        *("ACTIVE", "ibstat"),
    ),
    "little memory can be locked": (
        *(replace(GOOD_GPU, memlock=8 * 1024**2), "UCX", "memlock"),
        *("8192 KiB", "LimitMEMLOCK=infinity"),
    ),
    "UCX without RDMA": (
        *(replace(GOOD_GPU, infiniband=()), "UCX", "transport"),
        *("silently falls back to TCP", "LIBFABRIC"),
    ),
    "UCX on EFA": (GOOD_EFA, "UCX", "transport", "silently falls back to TCP", "LIBFABRIC"),
    "no EFA provider": (
        *(replace(GOOD_EFA, efa_domains=()), "LIBFABRIC", "transport"),
        *("fi_info -p efa lists nothing", "reinstall aws-efa-installer"),
    ),
    "no fi_info": (
        *(replace(GOOD_EFA, efa_domains=None), "LIBFABRIC", "transport"),
        *("fi_info is not installed", "aws-efa-installer"),
    ),
    "libfabric told to use sockets": (
        *(replace(GOOD_EFA, environment={"FI_PROVIDER": "sockets"}), "LIBFABRIC", "transport"),
        *("silently", "FI_PROVIDER=efa"),
    ),
    "a rail down": (
        *(replace(GOOD_EFA, efa_domains=GOOD_EFA.efa_domains[1:] if GOOD_EFA.efa_domains else ()),),
        *("LIBFABRIC", "transport", "15 EFA rails for 8 GPUs", "every rail is up"),
    ),
}


@pytest.mark.parametrize("case", MACHINES)
def test_a_spoiled_host(case: str) -> None:
    machine, backend, name, text, remedy = MACHINES[case]
    findings = {finding.name: finding for finding in check_machine(machine, [vllm_worker(backend)])}
    assert findings[name].status is not Status.OK
    assert text in findings[name].text
    assert remedy in findings[name].remedy


@pytest.mark.parametrize(
    ("machine", "backend", "said"),
    [
        (GOOD_GPU, "UCX", "mlx5_0, mlx5_1"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "^tcp"}), "UCX", "^tcp"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "rc,cuda_copy"}), "UCX", "rc"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "rc_mlx5,cuda_copy"}), "UCX", "rc_mlx5"),
        (replace(GOOD_GPU, environment={"UCX_TLS": "^rc_verbs"}), "UCX", "^rc_verbs"),
        (replace(GOOD_GPU, environment={"UCX_NET_DEVICES": "mlx5_1:1,eth0"}), "UCX", "over mlx5_1"),
        (replace(GOOD_GPU, environment={"UCX_NET_DEVICES": "^mlx5_0"}), "UCX", "over mlx5_1"),
        (replace(GOOD_GPU, memlock=1024**3), "UCX", "mlx5_0"),
        (GOOD_EFA, "LIBFABRIC", "16 EFA rails, 2 per GPU"),
        (replace(GOOD_GPU, gpus=0, infiniband=()), "UCX", "without GPUs"),
    ],
)
def test_a_sound_host(machine: Machine, backend: str, said: str) -> None:
    findings = check_machine(machine, [vllm_worker(backend)])
    assert {finding.status for finding in findings} == {Status.OK}
    (transport,) = (finding for finding in findings if finding.name == "transport")
    assert said in transport.text


def test_devices_are_those_that_can_be_opened_and_are_up(tmp_path: Path) -> None:
    for number, (name, state) in enumerate({"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}.items()):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        verbs = tmp_path / "infiniband_verbs" / f"uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{name}\n")
    nodes = tmp_path / "dev"
    nodes.mkdir()
    (nodes / "uverbs1").touch()
    found = rdma_devices(tmp_path, nodes)
    assert found == (Rdma("mlx5_0", (1,), accessible=False), Rdma("mlx5_1", (), accessible=True))
    assert rdma_devices(tmp_path / "none", nodes) == ()


@pytest.mark.parametrize(
    ("milliseconds", "gpus", "status"),
    # 20 MB: 10 ms of latency, and 20 ms at 1 GB/s.
    [(29.9, 8, Status.OK), (30.1, 8, Status.WARN), (30.1, 0, Status.OK)],
)
def test_a_read_that_is_slow_for_gpus(milliseconds: float, gpus: int, status: Status) -> None:
    read = turn_pb2.Transfer(bytes=20_000_000, duration_ms=milliseconds)
    reuse = turn_pb2.Reuse(verdict=turn_pb2.VERDICT_READBACK, readback=read)
    finding = judge(turn_pb2.Summary(reuse=reuse), gpus)
    assert finding.status is status
    assert bool(finding.remedy) == (status is Status.WARN)


@pytest.mark.parametrize(
    ("descriptors", "gpus", "status", "said"),
    [
        (3, 8, Status.OK, "1024 KiB per block of 16 tokens, in one piece"),
        (192, 8, Status.WARN, "in 64 pieces of 16 KiB: layer by layer"),
        (192, 0, Status.OK, "in 64 pieces of 16 KiB: layer by layer"),
    ],
)
def test_the_layout_is_what_a_read_moved(descriptors: int, gpus: int, status: Status, said: str) -> None:
    reuse = turn_pb2.Reuse(
        tokens=turn_pb2.TokenSources(readback=48),
        readback=turn_pb2.Transfer(bytes=3 * 1024 * 1024, descriptors=descriptors),
    )
    finding = judge_layout(reuse, 16, gpus)
    assert finding is not None
    assert finding.status is status
    assert said in finding.text
    assert bool(finding.remedy) == (status is Status.WARN)
    assert judge_layout(turn_pb2.Reuse(), 16, gpus) is None


def test_hosts_of_simulated_engines_need_no_nixl() -> None:
    simulated = Seen("decode", "127.0.0.1:1", worker_pb2.WorkerInfo(engine="simulated"))
    assert check_machine(Machine(), [simulated]) == []


def test_fi_info_s_output() -> None:
    text = (
        "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\n    version: 123.0\n"
        "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\nprovider: efa\n    domain: rdmap1s6-rdm\n"
    )
    assert efa_domains(text) == ("rdmap0s6-rdm", "rdmap1s6-rdm")
    assert efa_domains("fi_getinfo: -61 (No data available)\n") == ()
