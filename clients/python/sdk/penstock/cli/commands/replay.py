"""`penstock replay`: step through a rollout, from the services or from exported files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.text import Text

from penstock.analysis.recordings import Recording, of_files, of_rollout
from penstock.cli.connections.completion import recordings
from penstock.cli.connections.options import AsJson, StateDir, Tokenizer
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import OK, clean, emit, out, run, usage_error
from penstock.cli.terminal.screen import Screen, interactive
from penstock.cli.views.json_shapes import event_shape, recording_shape, turn_shape
from penstock.cli.views.replay_steps import Step, steps

_HELP: Final = "n next  p back  g first  G last  up/down scroll  t tokens  q quit"


def replay(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ID|FILE[@ID]",
            help="A rollout; or a file of `export --table turns`, or a directory of `penstock rollout`.",
            autocompletion=recordings,
        ),
    ],
    tokens: Annotated[bool, typer.Option(help="Draw sampled tokens one by one, by their probability.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print all steps, for a pager or a file.")] = False,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Step through a rollout: phases, model calls, what the agent did, files, grade."""

    async def work() -> int:
        recording = await read_recording(what, tokenizer, state_dir)
        if as_json:
            for line in _lines(recording, tokens=tokens):
                emit(line)
        elif everything or not interactive(out):
            for number, step in enumerate(steps(recording)):
                out.print(Rule(Text(clean(f"{number} {step.title}")), align="left", style="cyan"), width=_rule_width())
                out.print(Group(*step.draw(tokens)))
        else:
            await _step_through(recording, tokens=tokens)
        return OK

    run(work())


def _rule_width() -> int | None:
    return None if out.is_terminal else 80


async def read_recording(what: str, tokenizer: Path | None, state_dir: Path | None) -> Recording:
    """Reads a command line's ID, FILE, or FILE@ID. An unreadable one ends the program."""
    place, rollout_id = Path(what), None
    if not place.exists() and "@" in what:
        name, _, rollout_id = what.rpartition("@")
        place = Path(name)
    if place.exists():
        return of_files(place, rollout_id, tokenizer)
    if "/" in what or place.suffix in (".jsonl", ".parquet"):
        usage_error(f"there is no file {place}")
    async with services(state_dir=state_dir) as ps:
        return await of_rollout(ps, what)


def _lines(recording: Recording, *, tokens: bool) -> Iterator[dict[str, Any]]:
    yield {"recording": recording_shape(recording)}
    for event in recording.events:
        yield {"event": event_shape(event)}
    for turn in recording.turns:
        yield {"call": turn_shape(recording, turn, tokens=tokens)}


async def _step_through(recording: Recording, *, tokens: bool) -> None:
    book = Book(recording, steps(recording), tokens=tokens)
    async with Screen(out) as screen:
        while book.open:
            screen.show(book.frame())
            book.press(await screen.key())


class Book:
    """The steps, the open step, and its scroll position."""

    def __init__(self, recording: Recording, pages: list[Step], *, tokens: bool) -> None:
        self._recording = recording
        self._pages = pages
        self._tokens = tokens
        self._number = 0
        self._top = 0
        self._height = 1
        self._length = 0
        self.open = True

    def press(self, key: str) -> None:
        """Handles a key."""
        last = len(self._pages) - 1
        match key:
            case "q" | "escape" | "closed":
                self.open = False
            case "n" | "right" | "enter" | "l":
                self._turn_to(self._number + 1)
            case "p" | "left" | "backspace" | "h":
                self._turn_to(self._number - 1)
            case "g" | "home":
                self._turn_to(0)
            case "G" | "end":
                self._turn_to(last)
            case "down" | "j":
                self._top += 1
            case "up" | "k":
                self._top -= 1
            case "pagedown" | "space":
                # Like a pager: the next page of the step, then the next step.
                if key == "space" and self._top + self._height >= self._length:
                    self._turn_to(self._number + 1)
                else:
                    self._top += self._height - 1
            case "pageup" | "b":
                self._top -= self._height - 1
            case "t":
                self._tokens = not self._tokens
            case _:
                pass

    def _turn_to(self, number: int) -> None:
        number = min(max(number, 0), len(self._pages) - 1)
        if number != self._number:
            self._number, self._top = number, 0

    def frame(self) -> RenderableType:
        """Returns the whole screen."""
        page = self._pages[self._number]
        self._height = max(1, out.size.height - 4)
        options = out.options.update(width=out.size.width, height=None)
        lines = out.render_lines(Group(*page.draw(self._tokens)), options, pad=False)
        self._length = len(lines)
        self._top = min(max(self._top, 0), max(0, len(lines) - self._height))
        shown = lines[self._top : self._top + self._height]
        shown += [[] for _ in range(self._height - len(shown))]
        below = len(lines) - self._top - self._height
        more = f"{below} more lines below  " if below > 0 else ""
        head = Text.assemble(
            (_line_of(self._recording.rollout_id), "bold"),
            f"  {self._number + 1} of {len(self._pages)}  ",
            (_line_of(page.title), "cyan"),
        )
        foot = Text.assemble((more, "yellow"), (_HELP, "dim"))
        for line in (head, foot):
            line.no_wrap, line.overflow = True, "ellipsis"
        body = Segments([part for line in shown for part in (*line, Segment.line())])
        return Group(head, Rule(style="dim"), body, foot)


def _line_of(text: str) -> str:
    """Returns foreign text for the screen's first line, clipped to that line."""
    return clean(" ".join(text.split()))
