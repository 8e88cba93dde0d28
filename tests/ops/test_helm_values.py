"""What values of the Helm chart come to."""

import json

from helm_kit import environment, of_kind, pods, rendered


def test_numbers_and_lists_reach_the_process_as_they_are() -> None:
    more = (
        "--set-json",
        'gateway.settings={"vllm_args": ["--chat-template-content-format", "string"], "turn_timeout_s": 0.5}',
        "--set-json",
        'worker.settings={"kv_cache_memory_bytes": 4294967296}',
        "--set-json",
        "model.maxModelLen=1048576",
    )
    decode = environment(pods("cpu", *more)["decode"])
    assert decode["KVLOOP_KV_CACHE_MEMORY_BYTES"] == "4294967296"
    assert decode["KVLOOP_MAX_MODEL_LEN"] == "1048576"
    gateway = environment(pods("cpu", *more)["gateway"])
    assert gateway["KVLOOP_MAX_MODEL_LEN"] == "1048576"
    assert gateway["KVLOOP_TURN_TIMEOUT_S"] == "0.5"
    assert json.loads(gateway["KVLOOP_VLLM_ARGS"]) == ["--chat-template-content-format", "string"]


def test_a_cluster_without_gpus_is_asked_for_none() -> None:
    for component in ("prefill", "decode"):
        (container,) = pods("cpu")[component]["spec"]["containers"]
        assert set(container["resources"]["limits"]) == {"memory"}


def test_workers_run_as_who_they_are_told_to() -> None:
    for user, confined in ((10001, True), (0, False)):
        for thing in rendered("", "--set", f"worker.runAsUser={user}"):
            if thing["kind"] in {"Deployment", "StatefulSet"}:
                security = thing["spec"]["template"]["spec"]["securityContext"]
                worker = thing["kind"] == "StatefulSet"
                assert security["runAsUser"] == (user if worker else 10001)
                assert security["runAsNonRoot"] == (confined or not worker)


def test_rollouts_wait_between_pods() -> None:
    """A client's retry must not meet the next router's end (docs/operations.md)."""
    for kind in ("Deployment", "StatefulSet"):
        assert all(thing["spec"]["minReadySeconds"] >= 5 for thing in of_kind("", kind).values())


def test_certificates_are_mounted_where_settings_say() -> None:
    for template in pods("tls").values():
        (container,) = template["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == "kvloop-tls"
        env = environment(template)
        for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
            assert env[f"KVLOOP_TLS_{name}"] == f"{mounts['tls']}/{file}"
    (monitor,) = of_kind("tls", "PodMonitor").values()
    schemes = {
        endpoint["port"]: endpoint.get("scheme") for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    assert schemes == {"metrics": None, "http": "https"}
