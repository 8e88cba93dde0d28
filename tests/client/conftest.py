"""Makes this folder's helpers importable, and those of the simulated fleets."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for folder in (_HERE, _HERE.parent / "router"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from client_fleet import shared_fleet  # noqa: E402, F401
