"""The Helm chart: rendered by helm, each object checked against Kubernetes' schemas, what must hold in it."""

import copy
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvloop.decode.settings import DecodeSettings
from kvloop.gateway.settings import GatewaySettings
from kvloop.prefill.settings import PrefillSettings
from kvloop.router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvloop"
VALUES = {file.stem: file for file in sorted((CHART / "ci").glob("*.yaml"))}
KUBERNETES = ("1.29", "1.37")
MODELS = {
    "router": RouterSettings,
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
Object = dict[str, Any]


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    assert program, "helm is missing: make helm"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


@cache
def rendered(case: str, *more: str) -> tuple[Object, ...]:
    chosen = ("-f", str(VALUES[case])) if case else ()
    done = helm("template", "x", str(CHART), *chosen, *more)
    assert done.returncode == 0, done.stderr
    return tuple(part for part in yaml.safe_load_all(done.stdout) if part)


def of_kind(case: str, kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in rendered(case) if o["kind"] == kind}


def pods(case: str) -> dict[str, Object]:
    """Return pod templates by component; a group's leader and members apart."""
    found = {}
    for thing in rendered(case):
        spec = thing.get("spec", {})
        named = {"": spec.get("template")} if thing["kind"] in {"Deployment", "StatefulSet"} else {}
        if group := spec.get("leaderWorkerTemplate"):
            named = {"": group["leaderTemplate"], "-member": group["workerTemplate"]}
        for suffix, template in named.items():
            found[template["metadata"]["labels"]["app.kubernetes.io/component"] + suffix] = template
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["", *VALUES])
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_follow_kubernetes_schemas(case: str, version: str) -> None:
    seen = set()
    for thing in rendered(case):
        if "monitoring.coreos.com" in thing["apiVersion"]:
            continue
        checked = copy.deepcopy(thing)
        if thing["kind"] == "LeaderWorkerSet":
            # Its schema is the controller's own; what is in it are pods.
            for role in ("leaderTemplate", "workerTemplate"):
                template = thing["spec"]["leaderWorkerTemplate"][role]
                pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
                kubernetes_validate.validate(pod, version, strict=True)
            continue
        kubernetes_validate.validate(checked, version, strict=True)
        seen.add(thing["kind"])
    assert seen >= {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "HorizontalPodAutoscaler",
    }
    assert ("StatefulSet" in seen) == (case != "groups")


def test_an_unsound_object_is_found() -> None:
    (broken,) = (o for o in rendered("") if o["kind"] == "Deployment" and "router" in o["metadata"]["name"])
    broken = copy.deepcopy(broken)
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


def test_the_chart_is_sound_and_refuses_unsound_values() -> None:
    assert helm("lint", "--strict", str(CHART)).returncode == 0
    for wrong, said in {
        "worker.kind=deployment": "/worker/kind",
        "router.replicas=0": "/router/replicas",
        "router.replica=3": "replica",
        "worker.nixlBackends=ucx": "/worker/nixlBackends",
        "metrics.port=0": "/metrics/port",
    }.items():
        done = helm("template", "x", str(CHART), "--set", wrong)
        assert done.returncode != 0
        assert said in done.stderr


@pytest.mark.parametrize("case", ["", *VALUES])
def test_pods_are_confined_and_probed(case: str) -> None:
    found = pods(case)
    assert set(found) >= {"router", "gateway", "prefill", "decode"}
    for component, template in found.items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert "memory" in container["resources"]["limits"]
        if component.endswith("-member"):
            continue
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        if component != "gateway":
            assert container["livenessProbe"]["grpc"]["service"] == "liveness"
            assert "service" not in container["readinessProbe"]["grpc"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert container["readinessProbe"]["grpc"]["port"] == ports["grpc"]
        # The pause, a drain, and what is left to end in.
        pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= pause + drain_s(component, container) + 5


def drain_s(component: str, container: Object) -> float:
    for variable in container["env"]:
        if variable["name"] == "KVLOOP_DRAIN_LIMIT_S":
            return float(variable["value"])
    field = "drain_s" if component == "gateway" else "drain_limit_s"
    return float(MODELS[component].model_fields[field].default)


@pytest.mark.parametrize("case", ["", *VALUES])
def test_every_setting_exists_and_its_process_takes_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for component, template in pods(case).items():
        if component.endswith("-member"):
            continue
        model = MODELS[component]
        (container,) = template["spec"]["containers"]
        with monkeypatch.context() as here:
            names = []
            for variable in container["env"]:
                value = variable.get("value", "redis://store:6379")
                value = value.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "pod-0")
                if variable["name"].startswith("KVLOOP_"):
                    names.append(variable["name"].removeprefix("KVLOOP_").lower())
                    here.setenv(variable["name"], value)
            assert len(names) == len(set(names)), f"{component}: a variable twice"
            assert set(names) <= set(model.model_fields), component
            model.load()


def test_transports() -> None:
    for case, backend, name, value in (
        ("efa", "LIBFABRIC", "FI_PROVIDER", "efa"),
        ("infiniband", "UCX", "UCX_TLS", "rc,cuda_copy,cuda_ipc,self,sm"),
    ):
        for component in ("prefill", "decode"):
            (container,) = pods(case)[component]["spec"]["containers"]
            env = {v["name"]: v.get("value") for v in container["env"]}
            assert env["KVLOOP_NIXL_BACKENDS"] == backend
            assert env[name] == value
            assert env["PYTHONHASHSEED"] == "0"
    (container,) = pods("efa")["decode"]["spec"]["containers"]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32


def test_engines_larger_than_a_host_are_groups() -> None:
    groups = of_kind("groups", "LeaderWorkerSet")
    assert set(groups) == {"x-prefill", "x-decode"}
    assert all(g["spec"]["leaderWorkerTemplate"]["size"] == 2 for g in groups.values())
    (leader,) = pods("groups")["decode"]["spec"]["containers"]
    assert "kvloop serve decode" in leader["command"][-1]
    (member,) = pods("groups")["decode-member"]["spec"]["containers"]
    assert "ray start" in member["command"][-1]
    arguments = {v["name"]: v.get("value") for v in leader["env"]}["KVLOOP_EXTRA_ENGINE_ARGS"]
    assert json.loads(arguments) == {"distributed_executor_backend": "ray"}


def test_budgets_services_and_policies_select_pods_that_exist() -> None:
    templates = pods("cpu").values()
    labels = [template["metadata"]["labels"] for template in templates]

    def selects(selector: dict[str, str]) -> bool:
        return any(selector.items() <= found.items() for found in labels)

    for thing in rendered("cpu"):
        spec = thing["spec"]
        if thing["kind"] == "Service":
            assert selects(spec["selector"])
        elif thing["kind"] == "PodDisruptionBudget":
            assert selects(spec["selector"]["matchLabels"])
            assert spec["maxUnavailable"] == 1
        elif thing["kind"] == "NetworkPolicy":
            assert selects(spec["podSelector"]["matchLabels"])
            for rule in spec["ingress"]:
                for peer in rule["from"]:
                    chosen = peer["podSelector"].get("matchLabels")
                    assert chosen is None or selects(chosen)
    scaled = of_kind("cpu", "HorizontalPodAutoscaler")
    assert set(scaled) == {"x-router", "x-gateway"}
    for name, deployment in of_kind("cpu", "Deployment").items():
        assert name not in scaled or "replicas" not in deployment["spec"], "it would undo the autoscaler"


def test_workers_take_calls_from_routers_and_each_other_alone() -> None:
    for name in ("x-prefill", "x-decode"):
        ingress = of_kind("", "NetworkPolicy")[name]["spec"]["ingress"]
        for rule in ingress:
            ports = {port["port"] for port in rule.get("ports", ())}
            peers = [peer["podSelector"].get("matchLabels", {}) for peer in rule["from"]]
            if ports != {"metrics"}:
                components = {peer["app.kubernetes.io/component"] for peer in peers}
                assert components <= {"router", "prefill", "decode"}


def test_the_rules_are_those_that_promtool_tested() -> None:
    (rule,) = of_kind("cpu", "PrometheusRule").values()
    tested = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert rule["spec"] == tested
