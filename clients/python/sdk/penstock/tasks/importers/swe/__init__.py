"""Importers of software engineering records: one module for each format, one way to write and to grade them all."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from penstock.tasks.importers.common import Choices, Folder, Imported
from penstock.tasks.importers.records import Record, records_of
from penstock.tasks.importers.swe import r2e_gym, swe_bench, swe_rebench, swe_smith
from penstock.tasks.importers.swe.instance import Instance, write

Reader = Callable[[Record, Choices], Instance]
"""Makes an instance of a record. Raises Refused."""

READERS: Final[Mapping[str, Reader]] = {
    "swe": swe_bench.of_any,
    "swe-bench": swe_bench.of,
    "swe-gym": swe_bench.of_swe_gym,
    "swe-smith": swe_smith.of,
    "swe-rebench": swe_rebench.of,
    "r2e-gym": r2e_gym.of,
}


def import_all(form: str, source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports every record of a file or directory that `choices.only` selects."""
    for number, record in enumerate(records_of(source), 1):
        name = name_of(record, number)
        if choices.selects(name):
            folder = Folder(destination, name)
            yield folder.filled(partial(fill, folder, READERS[form], record, choices))


def name_of(record: Record, number: int) -> str:
    """Returns a record's name; `number` counts from 1, for those without one."""
    named = record.get("instance_id") or (
        f"{record['repo_name']}-{str(record['commit_hash'])[:12]}"
        if record.get("repo_name") and record.get("commit_hash")
        else ""
    )
    return str(named or f"record-{number}")


def fill(folder: Folder, reader: Reader, record: Record, choices: Choices) -> None:
    """Fills a task directory from a record."""
    write(folder, reader(record, choices), choices)
