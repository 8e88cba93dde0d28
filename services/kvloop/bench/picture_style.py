"""How all pictures of measurements look."""

from typing import Any

DPI = 150
STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "kvloop",
    "hatch.linewidth": 0.8,
}
"""Of matplotlib's rcParams; the salt makes equal SVGs of equal figures."""
