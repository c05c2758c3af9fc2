"""Imports task formats of others as our task directories: Harbor, Terminal-Bench, SWE-bench's family, NeMo-Gym.

    report = import_tasks("harbor", Path("their-tasks"), Path("tasks"), Choices())

Each task becomes a directory of its own (a `task.yaml` and its files, graders included), which can be read, changed and
checked like any other. Unsupported parts are never dropped silently: the task is refused, or gets a note.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from penstock.client.errors import InvalidArgument
from penstock.tasks.importers import harbor, nemo_gym, swe, terminal_bench
from penstock.tasks.importers.common import Choices, Imported, Refused
from penstock.values.similar_names import did_you_mean

FORMATS: Final[Mapping[str, Callable[[Path, Path, Choices], Iterator[Imported]]]] = {
    "harbor": harbor.import_all,
    "terminal-bench": terminal_bench.import_all,
    "terminal-bench-2": harbor.import_all,
    **{form: partial(swe.import_all, form) for form in swe.READERS},
    "nemo-gym": nemo_gym.import_all,
}
"""Importers by name: from a source and a destination to the outcome for each task."""


def import_tasks(form: str, source: Path, destination: Path, choices: Choices | None = None) -> list[Imported]:
    """Imports all tasks of `source` into directories of `destination`.

    Raises:
        InvalidArgument: `TASK_FORMAT`, no such format; `TASK_IMPORT`, the source has no task, or the destination has
            one of the same name.
    """
    if form not in FORMATS:
        raise InvalidArgument(
            f"there is no format {form!r}{did_you_mean(form, FORMATS) or ';'} formats: {', '.join(FORMATS)}",
            reason="TASK_FORMAT",
        )
    if not source.exists():
        raise InvalidArgument(f"there is no {source}", reason="TASK_IMPORT")
    destination.mkdir(parents=True, exist_ok=True)
    found = list(FORMATS[form](source, destination, choices or Choices()))
    if not found:
        raise InvalidArgument(f"{source} has no task in the format {form}", reason="TASK_IMPORT")
    return found


__all__ = ["FORMATS", "Choices", "Imported", "Refused", "import_tasks"]
