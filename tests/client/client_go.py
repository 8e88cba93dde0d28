"""Go as Debian has it: libraries under /usr/share/gocode, ours by its import path beside them."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGED = "/usr/share/gocode"
MODULE = "kvloop/clients/go"


class Go:
    """Runs go in a GOPATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src" / MODULE
        self.source.parent.mkdir(parents=True)
        self.source.symlink_to(ROOT / "clients" / "go")
        self.environment = {
            **os.environ,
            "GO111MODULE": "off",
            "GOPATH": f"{folder}:{PACKAGED}",
            "GOFLAGS": "",
            # What grpc-go does by itself from 1.40 on.
            "GRPC_GO_RETRY": "on",
        }

    def run(self, *command: str, folder: Path | None = None, **environment: str) -> str:
        """Run a command where our packages are, and return what it printed; fails with that."""
        # Without a shell, go sees the link's own path only when told.
        where = str(folder or self.source)
        ended = subprocess.run(
            command,
            cwd=where,
            env={**self.environment, "PWD": where, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout
