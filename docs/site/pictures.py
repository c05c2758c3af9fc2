"""Small pictures for the pages, as SVG that follows the reader's light or dark theme.

A file by itself follows the system's theme; on the site, where it stands inside of the page, that of the page (`css`).
Coordinates are pixels from the upper left corner. Nothing here depends on fonts that are installed.
"""

from collections.abc import Sequence
from html import escape
from math import hypot
from typing import Final

_COLOURS: Final = {
    # name: (light, dark)
    "text": ("#1f2d2d", "#e4eded"),
    "muted": ("#566868", "#a3b4b4"),
    "line": ("#6b7f7f", "#8fa3a3"),
    "plain": ("#f3f6f6", "#2a3438"),
    "agent": ("#e2eafb", "#25345a"),
    "agent-edge": ("#4a6fc4", "#8aa9f0"),
    "gate": ("#fdeccd", "#4a3714"),
    "gate-edge": ("#b97400", "#e9b04d"),
    "policy": ("#d3efeb", "#0e403b"),
    "policy-edge": ("#00796b", "#4db6ac"),
    "bad": ("#fbdfdc", "#562623"),
    "bad-edge": ("#c2402f", "#ef8f83"),
}
_KINDS: Final = ("agent", "gate", "policy", "bad")
_RULES: Final = "".join(
    [
        ".picture text{fill:var(--p-text);font:14px system-ui,-apple-system,'Segoe UI',sans-serif;text-anchor:middle}",
        ".picture .small{fill:var(--p-muted);font-size:12px}.picture .left{text-anchor:start}",
        ".picture .strong{font-weight:600}",
        ".picture .code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}",
        ".picture rect{fill:var(--p-plain);stroke:var(--p-line);stroke-width:1.2}",
        ".picture path{fill:none;stroke:var(--p-line);stroke-width:1.5}.picture polygon{fill:var(--p-line)}",
        ".picture .frame{fill:none;stroke-dasharray:5 4}.picture .dotted{stroke-dasharray:3 4}",
        *(f".picture .{kind}{{fill:var(--p-{kind});stroke:var(--p-{kind}-edge)}}" for kind in _KINDS),
    ]
)


class Picture:
    """A drawing of a given size with a title for readers who do not see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, small: str = "", kind: str = ""
    ) -> None:
        """A rectangle with one line of text, or two: the second is smaller. `kind`: one of the colours, or `frame`."""
        name = f' class="{kind}"' if kind else ""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"{name}/>')
        middle = x + width / 2
        if text and small:
            self.text(middle, y + height / 2 - 4, text, "strong")
            self.text(middle, y + height / 2 + 14, small, "small")
        elif text:
            self.text(middle, y + height / 2 + 5, text)

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """A line of text around `x`, its base at `y`; `style`: words of small, strong, code, left."""
        name = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{name}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], text: str = "", below: bool = False, dotted: bool = False) -> None:
        """A line through the points with its head at the last; its text above the middle of the first stretch."""
        (x0, y0), (x1, y1) = points[-2:]
        length = hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        path = " ".join(f"{'L' if index else 'M'}{x:g} {y:g}" for index, (x, y) in enumerate(points))
        name = ' class="dotted"' if dotted else ""
        self._parts.append(f'<path d="{path}"{name}/>')
        corners = [(x1, y1), *((x1 - 9 * dx + side * 4 * dy, y1 - 9 * dy - side * 4 * dx) for side in (1, -1))]
        self._parts.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>')
        if text:
            (x0, y0), (x1, y1) = points[:2]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 + (16 if below else -6), text, "small")

    def cells(self, x: float, y: float, width: float, cells: Sequence[tuple[str, str]], *, height: float = 26) -> None:
        """A row of boxes side by side, each with its text and kind."""
        for index, (text, kind) in enumerate(cells):
            left = x + index * width
            name = f' class="{kind}"' if kind else ""
            self._parts.append(f'<rect x="{left:g}" y="{y:g}" width="{width:g}" height="{height:g}"{name}/>')
            self.text(left + width / 2, y + height / 2 + 4, text, "code")

    def inside(self) -> str:
        """The picture for a page that has `css()`: one line."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(self._title)}">'
            f"{''.join(self._parts)}</svg>"
        )

    def file(self) -> str:
        """The picture as a file of its own."""
        light, dark = _variables(0), _variables(1)
        style = f"<style>.picture{{{light}}}@media(prefers-color-scheme:dark){{.picture{{{dark}}}}}{_RULES}</style>"
        head, _, rest = self.inside().partition(">")
        return f"{head}>\n<title>{escape(self._title)}</title>\n{style}\n" + rest.replace("><", ">\n<") + "\n"


def css() -> str:
    """The style sheet of the site's pages for the pictures inside of them."""
    return (
        f".picture{{{_variables(0)};display:block;max-width:100%;height:auto}}\n"
        f"[data-md-color-scheme=slate] .picture{{{_variables(1)}}}\n{_RULES}\n"
    )


def _variables(theme: int) -> str:
    return ";".join(f"--p-{name}:{colours[theme]}" for name, colours in _COLOURS.items())
