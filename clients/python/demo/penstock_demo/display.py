"""What a person sees: the curve and the last steps, live; plain lines without a terminal; a picture at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.client import PenstockError

WIDTH, HEIGHT = 64, 10  # of the curve, in characters; each is 2 x 4 dots of Braille
TARGET = 0.9
ROWS = 8


class Figures(TypedDict):
    """What the rollouts of a step say. `success` and `reward_mean` are over those that were graded."""

    success: float
    reward_mean: float
    rollouts: int
    tokens: int
    ungraded: int


class Metrics(Figures):
    """A line of metrics.jsonl. `policy_version` is the one that the step's rollouts sampled from; times in seconds."""

    step: int
    policy_version: int
    seconds: float
    elapsed: float
    loss: float
    logprob_gap: float


def recent(history: Sequence[Metrics], window: int = 10) -> float:
    """Mean success over the last `window` steps (or as many as there are)."""
    last = history[-window:]
    return sum(metrics["success"] for metrics in last) / max(len(last), 1)


def reasons(error: Exception) -> str:
    """Returns what the services' errors say, one after the other. Raises the error if it is, or has, another kind.

    `except*` would do it, but before Python 3.11.4 a program that exits in such a block shows a traceback.
    """
    if isinstance(error, PenstockError):
        return str(error)
    if not isinstance(error, ExceptionGroup):
        raise error
    known, others = error.split(PenstockError)
    if known is None or others is not None:
        raise error
    return "; ".join(reasons(one) for one in known.exceptions)


class Display:
    """`with Display(...) as display: display.say(...); display.step(metrics)`."""

    def __init__(self, title: str, window: int = 10) -> None:
        self.console = Console()
        self._title = title
        self._window = window
        self._doing = ""
        self._history: list[Metrics] = []
        self._live = Live(console=self.console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._doing = ""
        if self._live.is_started:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def say(self, doing: str) -> None:
        """What is going on now."""
        if self._live.is_started:
            self._doing = doing
            self._live.update(self._render())

    def begin(self, doing: str) -> None:
        """As `say`, of something that takes a while: where there is no live screen, a line."""
        self.say(doing)
        if not self._live.is_started:
            self.console.print(doing, highlight=False, soft_wrap=True)

    def step(self, metrics: Metrics) -> None:
        """A step is done."""
        self._history.append(metrics)
        if not self._live.is_started:
            self.console.print(
                f"step {metrics['step']:3d}  success {metrics['success']:.2f}  reward {metrics['reward_mean']:.2f}  "
                f"policy v{metrics['policy_version']}  gap {metrics['logprob_gap']:.1e}  "
                f"{metrics['rollouts']} rollouts  {metrics['seconds']:.1f} s",
                highlight=False,
                soft_wrap=True,  # in a file there is no width
            )

    def _render(self) -> Panel:
        parts: list[Text | Table] = []
        if self._history:
            parts += [
                _curve([metrics["success"] for metrics in self._history], self._history[0]["rollouts"]),
                Text(),
                _table(self._history, self._window),
            ]
        if self._doing:
            parts.append(Text(self._doing, style="dim"))
        return Panel(Group(*parts), title=self._title, border_style="cyan", width=WIDTH + 14)


def _curve(values: list[float], rollouts: int) -> Text:
    """Success by step of that many rollouts as a Braille line, and a rule at TARGET."""
    dots_x, dots_y = WIDTH * 2, HEIGHT * 4
    cells = [[0] * WIDTH for _ in range(HEIGHT)]
    # Bit of the dot in column x (0, 1) and row y (0 = top) of a Braille character.
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    span = max(len(values) - 1, 20)
    line = {}
    for x in range(dots_x):
        position = x / (dots_x - 1) * span
        left = int(position)
        if left + 1 < len(values):
            value = values[left] + (values[left + 1] - values[left]) * (position - left)
        elif left < len(values) and position == left:
            value = values[left]
        else:
            break
        line[x] = round((1.0 - value) * (dots_y - 1))
    for x, y in line.items():
        previous = line.get(x - 1, y)
        for fill in range(min(y, previous + (y > previous)), max(y, previous - (y < previous)) + 1):
            cells[fill // 4][x // 2] |= bits[x % 2][fill % 4]
    rule = round((1.0 - TARGET) * (dots_y - 1)) // 4
    text = Text()
    for row, cell_row in enumerate(cells):
        label = {0: "1.0", rule: f"{TARGET:.1f}", HEIGHT // 2: "0.5", HEIGHT - 1: "0.0"}.get(row, "")
        text.append(f"{label:>5} ", style="dim")
        for cell in cell_row:
            if cell:
                text.append(chr(0x2800 + cell), style="bold green")
            else:
                text.append("┈" if row == rule else " ", style="dim")
        text.append("\n")
    text.append(f"{f'success of {rollouts} rollouts, by step (0 to {span})':^{WIDTH + 6}}", style="dim")
    return text


def _table(history: list[Metrics], window: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("step", "success", f"last {window}", "reward", "policy", "gap", "tokens", "seconds"):
        table.add_column(name, justify="right", header_style="bold")
    for index in range(max(len(history) - ROWS, 0), len(history)):
        metrics = history[index]
        table.add_row(
            str(metrics["step"]),
            f"{metrics['success']:.2f}",
            f"{recent(history[: index + 1], window):.2f}",
            f"{metrics['reward_mean']:.2f}",
            f"v{metrics['policy_version']}",
            f"{metrics['logprob_gap']:.1e}",
            str(metrics["tokens"]),
            f"{metrics['seconds']:.1f}",
        )
    return table


def _beside(steps: list[int]) -> tuple[float, float]:
    """The first and the last step, with room beside them: a label in the corner would be cut."""
    span = max(steps[-1] - steps[0], 1)
    return steps[0] - 0.02 * span, steps[0] + 1.02 * span


def save_picture(history: list[Metrics], path: Path, title: str, window: int = 10) -> None:
    """Success and reward by step, and the mean success of `window` steps, as a PNG."""
    import matplotlib as mpl  # here: it takes a second that the first screen need not wait for

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    steps = [metrics["step"] for metrics in history]
    means = [recent(history[: index + 1], window) for index in range(len(history))]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axhline(TARGET, color="#9aa5b1", linewidth=1, linestyle=(0, (2, 4)))
    axes.plot(steps, [m["reward_mean"] for m in history], color="#f0a202", linewidth=1.2, label="mean reward")
    axes.plot(steps, [m["success"] for m in history], ".-", color="#7cc6a4", linewidth=1, label="success")
    axes.plot(steps, means, color="#0b7a75", linewidth=2.6, label=f"success, last {window} steps")
    axes.set(xlabel=f"GRPO step ({history[0]['rollouts']} rollouts each)", ylim=(0, 1.03), xlim=_beside(steps))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))  # there is no step 2.5
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
