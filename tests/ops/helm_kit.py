"""The Helm chart as helm renders it."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvloop"
VALUES = {file.stem: file for file in sorted((CHART / "ci").glob("*.yaml"))}
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


def pods(case: str, *more: str) -> dict[str, Object]:
    """Return pod templates by component."""
    found = {}
    for thing in rendered(case, *more):
        spec = thing.get("spec", {})
        templates = [spec["template"]] if thing["kind"] in {"Deployment", "StatefulSet"} else []
        if group := spec.get("leaderWorkerTemplate"):
            templates = [group["leaderTemplate"], group["workerTemplate"]]
        for template in templates:
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def environment(template: Object) -> dict[str, str]:
    """Return a pod's environment; what comes from elsewhere is empty."""
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}
