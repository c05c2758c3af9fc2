"""What a run of the suite leaves out unless it is asked for, and says so: `--full`, or the name of the test's file.

`@pytest.mark.on_demand("why")` is for a test that shows again, at the price of many seconds of a processor, what
another test of the same run shows. The reason says which. A variant of the sandbox conformance suite says the same of
itself (`tests/conformance/sandbox/services.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.conformance.sandbox import services

MARK: Final = "on_demand"
_SENT: Final = "left_out"
_left_out = pytest.StashKey[dict[str, int]]()


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has the mark."""
    marked = {} if config.getoption("--full") else {item: why for item in items if (why := _reason(item)) is not None}
    named = _named(config)
    marked = {item: why for item, why in marked.items() if item.path not in named}
    if marked:
        config.hook.pytest_deselected(items=list(marked))
        items[:] = [item for item in items if item not in marked]
    counts = dict(Counter(marked.values()))
    config.stash[_left_out] = counts
    sent: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if sent is not None:
        sent[_SENT] = counts


def received(node: Any) -> None:
    """Keeps what one of several processes left out: each leaves out the same."""
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get(_SENT, {})


def lines(config: pytest.Config, nodeids: Sequence[str]) -> list[str]:
    """A line for each reason for which something was left out of a run of these tests."""
    counts = config.stash.get(_left_out, {})
    said = [f"NOT RUN [{count}] (`--full` runs them) {why}" for why, count in counts.items()]
    if any(nodeid.startswith("tests/conformance/sandbox/") for nodeid in nodeids):
        variants = services.not_run(config.getoption("--backend"), full=config.getoption("--full"))
        said += [f"NOT RUN (`--full`, or `--backend NAME` for one of them, runs it) {line}" for line in variants]
    return said


def _reason(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker(MARK)
    return None if mark is None else str(mark.args[0])


def _named(config: pytest.Config) -> set[Path]:
    """The files that the command line names, alone or with a test of theirs."""
    places = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    return {place.resolve() for place in places if place.is_file()}
