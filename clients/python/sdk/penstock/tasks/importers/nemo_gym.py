"""NeMo-Gym's records: `responses_create_params` (the prompt), and fields for the resources server that grades.

Those are imported whose grading needs no server: software engineering records (SWE-bench and SWE-Gym, at the top or in
`responses_create_params.metadata.instance_dict`), programs with inputs and outputs (`verifier_metadata.unit_tests`),
multiple choice (`options`, `expected_answer`) and texts (`extraction_mode`, `expected_answer`). An agent works in a
sandbox, where its answer is a file: a sentence about it is added to the prompt. All others are refused, with the
fields that only their server understands.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any, Final

from penstock.tasks.importers import swe
from penstock.tasks.importers.common import GRADER_FOLDER, Choices, Folder, Imported, Refused
from penstock.tasks.importers.records import Record, parsed, records_of

_ANSWER: Final = "answer.txt"
_PROGRAM: Final = "answer.py"
MAX_UNIT_TESTS: Final = 1000
"""Of a program; the digests of their outputs are arguments of a command."""
_SECONDS: Final = 10.0
"""Each run of a program may take."""
_OF_PROMPT: Final = frozenset({"responses_create_params", "agent_ref"})
_MODES: Final = frozenset({"boxed", "final_answer", "last_line", "full_response"})


def import_all(source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports every record of a file or directory that `choices.only` selects."""
    for number, record in enumerate(records_of(source), 1):
        name = _name(record, number)
        if choices.selects(name):
            folder = Folder(destination, name)
            yield folder.filled(partial(_fill, folder, record, choices))


def _name(record: Record, number: int) -> str:
    request = record.get("responses_create_params")
    metadata = request.get("metadata") if isinstance(request, Mapping) else None
    given = [record.get(name) for name in ("instance_id", "task_id", "uuid", "hash_id")]
    if isinstance(metadata, Mapping):
        given.append(metadata.get("instance_id"))
    return str(next((item for item in given if isinstance(item, str) and item), f"record-{number}"))


def _fill(folder: Folder, record: Record, choices: Choices) -> None:
    request = parsed(record, "responses_create_params", dict)
    if request is None:
        raise Refused("it has no responses_create_params")
    metadata = parsed(request, "metadata", dict) or {}
    instance = parsed(metadata, "instance_dict", dict) or (record if "FAIL_TO_PASS" in record else None)
    if instance is not None:
        data_set = str(metadata.get("dataset_name") or record.get("subset") or "")
        gym = data_set in ("gym", "SWE-Gym/SWE-Gym")
        swe.fill(folder, swe.READERS["swe-gym" if gym else "swe-bench"], instance, choices)
    else:
        _fill_from_prompt(folder, record, request, metadata)
    folder.content["metadata"] = {**folder.content["metadata"], "collection": "nemo-gym"}


def _fill_from_prompt(folder: Folder, record: Record, request: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    named = str(record.get("instance_id") or metadata.get("instance_id") or "")
    if "::" in named:
        raise Refused(f"{named} only names a task of Harbor: import that data set with the format harbor")
    if tools := request.get("tools"):
        raise Refused(f"responses_create_params.tools: {len(tools)} tools of a resources server, which a task lacks")
    prompt = _prompt(request.get("input"))
    unit_tests = (parsed(record, "verifier_metadata", dict) or {}).get("unit_tests")
    if isinstance(unit_tests, dict):
        _put_program(folder, prompt, unit_tests)
    elif "options" in record and "expected_answer" in record:
        _put_choice(folder, prompt, record)
    elif "extraction_mode" in record and "expected_answer" in record:
        _put_text(folder, prompt, record)
    else:
        fields = ", ".join(sorted(set(record) - _OF_PROMPT)) or "no field but the prompt"
        raise Refused(f"only its resources server can grade it ({fields})")
    folder.content["metadata"] = {"format": "nemo-gym"}


def _prompt(given: Any) -> str:
    """Returns the request's texts as one: system texts first, then the user's."""
    if isinstance(given, str):
        return given
    texts: list[str] = []
    for message in given if isinstance(given, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user"):
            raise Refused(f"responses_create_params.input: a message of {role or 'no role'}: a task has only a prompt")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "input_text", "text": content}]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "input_text" or not isinstance(part.get("text"), str):
                raise Refused("responses_create_params.input: only text is imported")
            texts.append(part["text"])
    if not "".join(texts).strip():
        raise Refused("responses_create_params.input is empty")
    return "\n\n".join(texts)


def _put(folder: Folder, prompt: str, sentence: str) -> None:
    folder.content["instruction"] = f"{prompt.rstrip()}\n\n{sentence}\n"
    folder.notes.append(f"added to its prompt: {sentence}")


def _judge(*arguments: str) -> list[str]:
    """Returns the command of the judge. Its program and what it knows are not in the sandbox before it runs."""
    program = resources.files("penstock.tasks.importers").joinpath("programs", "nemo_judge.py").read_text("utf-8")
    return ["python3", "-I", "-c", program, *arguments]


def _put_program(folder: Folder, prompt: str, unit_tests: Mapping[str, Any]) -> None:
    inputs, outputs = unit_tests.get("inputs"), unit_tests.get("outputs")
    if unit_tests.get("fn_name"):
        raise Refused("verifier_metadata.unit_tests.fn_name: only programs that read standard input are graded")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise Refused("verifier_metadata.unit_tests: inputs and outputs are not lists of one length")
    if len(inputs) > MAX_UNIT_TESTS:
        raise Refused(f"verifier_metadata.unit_tests: {len(inputs)} tests; at most {MAX_UNIT_TESTS} are graded")
    _put(folder, prompt, f"Write the complete Python program to the file {_PROGRAM}.")
    runner, given, results = (f"{GRADER_FOLDER}/{name}" for name in ("nemo_run.py", "inputs.json", "results.json"))
    digests = [sha256("\n".join(_printed(str(text))).encode()).hexdigest() for text in outputs]
    verify = len(inputs) * _SECONDS + 60.0
    folder.content["limits"] = {"verify": verify + 60.0}
    folder.content["verifier"] = {
        "files": [
            {"path": runner, "from": folder.program("nemo_run.py")},
            {"path": given, "from": folder.write("inputs.json", json.dumps([str(text) for text in inputs]))},
        ],
        # What the first command runs is the agent's: the second alone knows the outputs, and only their digests.
        "commands": [
            {"argv": ["python3", "-I", runner, _PROGRAM, given, results, str(_SECONDS)], "timeout": verify},
            {"argv": _judge("program", results, *digests), "timeout": 60.0},
        ],
        "reward": "file",
    }
    folder.notes.append("outputs are compared word by word: numbers are not rounded")


def _printed(text: str) -> list[str]:
    """Returns lines as they are compared: words, without empty lines at the end. As in programs/nemo_judge.py."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _put_choice(folder: Folder, prompt: str, record: Record) -> None:
    if parsed(record, "template_metadata", dict):
        raise Refused("template_metadata: an answer is not found by expressions of the record's")
    letters = [key for option in parsed(record, "options", list) or () for key in dict(option)]
    wanted = str(record["expected_answer"]).strip().upper()
    if not all(re.fullmatch(r"[A-Za-z]", str(letter)) for letter in letters) or wanted not in map(str.upper, letters):
        raise Refused(f"expected_answer: {wanted!r} is none of the letters of options")
    _put(folder, prompt, f"Write the letter of your answer to the file {_ANSWER}.")
    _put_answer(folder, "letter", wanted)


def _put_text(folder: Folder, prompt: str, record: Record) -> None:
    mode, wanted = record["extraction_mode"], str(record["expected_answer"]).strip()
    if mode not in _MODES:
        raise Refused(f"extraction_mode: {mode!r} is none of {', '.join(sorted(_MODES))}")
    if not wanted:
        raise Refused("expected_answer is empty")
    _put(folder, prompt, f"Write your final answer, and nothing else, to the file {_ANSWER}.")
    _put_answer(folder, "exact" if record.get("case_sensitive") else "text", wanted)


def _put_answer(folder: Folder, how: str, wanted: str) -> None:
    folder.content["verifier"] = {
        "commands": [{"argv": _judge(how, _ANSWER, wanted), "timeout": 60.0}],
        "reward": "file",
    }
