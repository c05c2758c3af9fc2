"""Judges what an agent left: an answer in a file, or what its program printed, against what is expected.

    letter FILE LETTER | text FILE ANSWER | exact FILE ANSWER | program RESULTS_JSON DIGEST...

It runs nothing of the agent's, and reads at most what an answer may have; its reward is the last thing it writes.
"""

import hashlib
import json
import os
import re
import sys

MOST = 64 << 20


def content(path: str) -> str:
    """A regular file's text; nothing else is opened for good, and a link is not followed."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            return file.read(MOST).decode("utf-8", "replace")
    except OSError as error:
        print(error)
        return ""


def boxed(text: str) -> str:
    """What is in the last \\boxed{...}, or the whole text."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    depth, inner = 1, []
    for letter in text[start + len("\\boxed{") :]:
        depth += (letter == "{") - (letter == "}")
        if not depth:
            break
        inner.append(letter)
    answer = "".join(inner).strip()
    wrapped = re.fullmatch(r"\\text\{\s*(.*?)\s*\}", answer, re.DOTALL)
    return wrapped.group(1) if wrapped else answer


def is_right(how: str, given: str, wanted: str) -> bool:
    """Whether an answer is the expected one."""
    answer = " ".join(boxed(given).split())
    if how == "letter":
        found = re.fullmatch(r"[^A-Za-z]*([A-Za-z])(?:[^A-Za-z]*|\s*[:).-].*)", answer)
        return found is not None and found.group(1).upper() == wanted
    wanted = " ".join(wanted.split())
    return answer == wanted if how == "exact" else answer.casefold() == wanted.casefold()


def share(given: str, digests: "list[str]") -> float:
    """The share of a program's outputs that have the expected digest."""
    try:
        outputs = json.loads(given)
    except ValueError:
        outputs = None
    if not isinstance(outputs, list) or len(outputs) != len(digests):
        return 0.0
    right = 0
    for number, digest in enumerate(digests):
        output = outputs[number]
        lines = [" ".join(line.split()) for line in output.strip().splitlines()] if isinstance(output, str) else None
        right += lines is not None and hashlib.sha256("\n".join(lines).encode()).hexdigest() == digest
    return right / len(digests)


def main() -> None:
    how, path, *wanted = sys.argv[1:]
    reward, components = 0.0, {}  # type: float, dict[str, float]
    try:
        given = content(path)
        if how == "program":
            components = {"passed": share(given, wanted)}
            reward = float(components["passed"] == 1.0)
        else:
            reward = float(is_right(how, given, wanted[0]))
    finally:
        with open(os.environ["PENSTOCK_REWARD_FILE"], "w", encoding="utf-8") as file:
            json.dump({"reward": reward, "components": components}, file)


main()
