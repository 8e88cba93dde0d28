"""The Helm chart: rendered by helm, each object checked against Kubernetes' schemas, what must hold in it."""

import copy
import json
import re

import kubernetes_validate
import pytest
import yaml
from helm_kit import CHART, ROOT, VALUES, Object, helm, of_kind, pods, rendered

from kvloop.decode.settings import DecodeSettings
from kvloop.gateway.settings import GatewaySettings
from kvloop.prefill.settings import PrefillSettings
from kvloop.router.settings import RouterSettings

KUBERNETES = ("1.29", "1.37")
MODELS = {
    "router": RouterSettings,
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
WORKERS = {"prefill", "decode", "prefill-member", "decode-member"}


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
        # What is alive, but not ready yet (a model loads, a router waits for workers), is not started anew.
        grpc = case != "tls" and component != "gateway"
        assert asked(container, "startupProbe", grpc=grpc) == ("liveness" if grpc else "/livez")
        assert asked(container, "livenessProbe", grpc=grpc) == ("liveness" if grpc else "/livez")
        ready = "" if grpc else "/health" if component == "gateway" else "/readyz"
        assert asked(container, "readinessProbe", grpc=grpc) == ready
        # The pause, a drain, and what is left to end in.
        pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= pause + drain_s(component, container) + 5


def asked(container: Object, name: str, *, grpc: bool) -> str:
    """Return what a probe asks for, of a port that is there."""
    probe = container[name]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if grpc:
        assert probe["grpc"]["port"] == ports["grpc"]
        return str(probe["grpc"].get("service", ""))
    assert probe["httpGet"]["port"] in ports
    # Only the gateway's HTTP door takes part in TLS; gRPC probes could not.
    tls = {v["name"] for v in container["env"]} >= {"KVLOOP_TLS_CERT", "KVLOOP_TLS_KEY"}
    https = tls and probe["httpGet"]["port"] == "http"
    assert probe["httpGet"].get("scheme", "HTTP") == ("HTTPS" if https else "HTTP")
    return str(probe["httpGet"]["path"])


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
    member_pod = pods("groups")["decode-member"]
    (member,) = member_pod["spec"]["containers"]
    assert re.match(r"until ray health-check .* exec ray start --block", member["command"][-1])
    # A leader that is ready has its members' GPUs; waiting for that before they start would be for ever.
    assert all(g["spec"]["startupPolicy"] == "LeaderCreated" for g in groups.values())
    # Members serve nothing: nobody calls or scrapes them.
    assert not {"ports", "readinessProbe"} & set(member)
    labels = member_pod["metadata"]["labels"].items()
    for service in of_kind("groups", "Service").values():
        assert not service["spec"]["selector"].items() <= labels
    arguments = {v["name"]: v.get("value") for v in leader["env"]}["KVLOOP_EXTRA_ENGINE_ARGS"]
    assert json.loads(arguments) == {"distributed_executor_backend": "ray"}


@pytest.mark.parametrize("case", ["cpu", "groups"])
def test_budgets_services_and_policies_select_pods_that_exist(case: str) -> None:
    templates = pods(case).values()
    labels = [template["metadata"]["labels"] for template in templates]

    def selects(selector: Object) -> bool:
        """Tell whether each part of a selector finds a pod."""
        wanted = selector.get("matchLabels", {}).items()
        for expression in selector.get("matchExpressions", ()):
            key, parts = expression["key"], set(expression["values"])
            found = {found[key] for found in labels if wanted <= found.items()} & parts
            roles = {part.removesuffix("-member") for part in parts}
            if found != (parts if case == "groups" else roles):
                return False
        return any(wanted <= found.items() for found in labels)

    for thing in rendered(case):
        spec = thing["spec"]
        if thing["kind"] == "Service":
            assert selects({"matchLabels": spec["selector"]})
        elif thing["kind"] == "PodDisruptionBudget":
            assert selects(spec["selector"])
            assert spec["maxUnavailable"] == 1
        elif thing["kind"] == "NetworkPolicy":
            assert selects(spec["podSelector"])
            for rule in spec["ingress"]:
                for peer in rule["from"]:
                    assert selects(peer["podSelector"])


def test_autoscalers_are_not_undone() -> None:
    scaled = of_kind("cpu", "HorizontalPodAutoscaler")
    assert set(scaled) == {"x-router", "x-gateway"}
    for name, deployment in of_kind("cpu", "Deployment").items():
        assert name not in scaled or "replicas" not in deployment["spec"], "it would undo the autoscaler"


def test_workers_take_calls_from_routers_and_each_other_alone() -> None:
    for name in ("x-prefill", "x-decode"):
        ingress = of_kind("", "NetworkPolicy")[name]["spec"]["ingress"]
        for rule in ingress:
            ports = {port["port"] for port in rule.get("ports", ())}
            if ports == {"metrics"}:
                continue
            for peer in rule["from"]:
                chosen = peer["podSelector"]
                components = {chosen["matchLabels"].get("app.kubernetes.io/component")} - {None}
                for expression in chosen.get("matchExpressions", ()):
                    components |= set(expression["values"])
                assert components
                assert components <= {"router", *WORKERS}


def test_the_rules_are_those_that_promtool_tested() -> None:
    (rule,) = of_kind("cpu", "PrometheusRule").values()
    tested = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert rule["spec"] == tested
