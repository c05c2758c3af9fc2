"""The style of plots of rollouts: the same in reports, notebooks and papers, on paper and on a screen.

The colours are distinguishable for people with red-green blindness, and in grey. Plotting needs matplotlib
(`pip install 'penstock[report]'`).
"""

from contextlib import AbstractContextManager
from typing import Any, Final

PASSED: Final = "#00735c"
FAILED: Final = "#ee9b72"
EXCLUDED: Final = "#b9bec4"
MISSING: Final = "#f0f1f3"
INK: Final = "#30363d"
PALE: Final = "#8b949e"

STYLE: Final[dict[Any, Any]] = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.constrained_layout.use": True,
    "figure.figsize": (6.4, 3.2),
    "legend.frameon": False,
    "lines.markersize": 3.5,
    "savefig.dpi": 200,
}
"""For `matplotlib.rcParams`: a plot fills the width of a page of text."""


def printed(**changes: Any) -> AbstractContextManager[None]:
    """Applies this style to plots in the block, on top of matplotlib's own defaults and not of a user's style sheet.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    style: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE, **changes}
    return matplotlib.rc_context(style)
