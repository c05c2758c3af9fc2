#!/usr/bin/env python3
"""Grades a software engineering task inside its sandbox: restores the tests, runs them, reads what each came to.

    swe_grade.py TASK_JSON       with the path of the reward file in PENSTOCK_REWARD_FILE

Only Python's standard library, of 3.7 and later, and git. The files that the test patch touches are set back to the
base commit and patched anew, whatever the agent made of them. Results are the runner's own, from pytest's JUnit XML or
the report of django_report.py or sympy_report.py beside this file, never from what was printed. Every test of
FAIL_TO_PASS has to pass, and every one of PASS_TO_PASS to pass or to be skipped; or all have to come to what is
expected of them. The code under test runs as the same user: it cannot look into this process, what it started is killed
before the reward is written, and where that does not come to pass there is none.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import Any, Dict

Task = Dict[str, Any]
Outcomes = Dict[str, str]

GOOD = ("passed", "xfailed", "skipped")
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
# Neither the user's configuration nor a hook that the agent left may have a part in it.
GIT = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"]


def main() -> None:
    reward_file = os.environ.pop("PENSTOCK_REWARD_FILE")
    libc = ctypes.CDLL(None)
    # Its first environment, its memory and its open files are not for other processes of the same user.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(sys.argv[1], encoding="utf-8") as file:
        task = json.load(file)
    os.chdir(task["workdir"] or ".")
    grade = ""
    try:
        grade = json.dumps(graded(task))
    finally:
        kill_descendants()
        with open(reward_file, "w", encoding="utf-8") as file:
            file.write(grade)


def graded(task: Task) -> dict[str, Any]:
    """The reward and its components."""
    restore(task)
    folder = tempfile.mkdtemp(prefix="grade-")
    try:
        report = run_tests(task, folder)
        found = results(report) if task["runner"] == "pytest" else reported(report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return judge(task, found)


def git(*arguments: str, **options: Any) -> None:
    environment = dict(os.environ, GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL="/dev/null", GIT_TERMINAL_PROMPT="0")
    subprocess.run(GIT + list(arguments), env=environment, check=True, **options)


def restore(task: Task) -> None:
    """The files of the test patch, as the task has them."""
    for path in task["new_files"]:
        remove(path)
    if task["changed_files"]:
        for path in task["changed_files"]:
            remove(path)
        git("checkout", "-q", task["base_commit"], "--", *task["changed_files"])
    if task["test_patch"].strip():
        git("apply", "--whitespace=nowarn", "-", input=task["test_patch"].encode("utf-8"))
    for path in task["helpers"]:
        if os.path.isfile(path):
            shutil.copy(path, task["test_files"][0])


def remove(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def run_tests(task: Task, folder: str) -> str:
    """Runs the files of all tests; the path of the report."""
    report = os.path.join(folder, "report")
    command = task["test_command"] + ' "$@"'
    arguments = list(task["test_files"])
    if task["runner"] == "pytest":
        arguments[:0] = ["-o", "junit_family=xunit1", "--junitxml=" + report, "-p", "no:cacheprovider"]
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    process = subprocess.Popen(
        ["bash", "-c", command, "bash"] + arguments,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env=dict(os.environ, PENSTOCK_GRADER=here, PENSTOCK_REPORT=report),
    )
    try:
        code = process.wait(task["timeout"])
        print(task["runner"], "ended with", code)
    except subprocess.TimeoutExpired:
        # Tests that did not come to an end did not pass.
        print(task["runner"], "was ended after", task["timeout"], "seconds")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return report


def results(report: str) -> Outcomes:
    """What each test came to, by its node id: passed, failure, error, skipped or xfailed."""
    found: Outcomes = {}
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError) as error:
        print("there is no report:", error)
        return found
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
        if outcome == "skipped" and any(child.get("type") == "pytest.xfail" for child in case):
            outcome = "xfailed"
        name = node_id(case.get("file"), case.get("classname") or "", case.get("name") or "")
        # The same test may stand twice: with its body, and with an error of its teardown.
        if found.get(name, "passed") == "passed":
            found[name] = outcome
    return found


def reported(report: str) -> Outcomes:
    """What each test came to, by the names of its runner."""
    try:
        with open(report, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        print("there is no report:", error)
        return {}
    return {str(name): str(outcome) for name, outcome in found.items()} if isinstance(found, dict) else {}


def node_id(file: str | None, classname: str, name: str) -> str:
    """`tests/test_a.py::TestB::test_c[d]` of what a JUnit report says of a test.

    Its `file` is where the function is written: for an inherited test, or one under a decorator, that may be another
    file than the one that pytest collected it from, which its `classname` begins with.
    """
    parts = classname.split(".")
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count]) + ".py"
        if os.path.isfile(path):
            return "::".join([path] + parts[count:] + [name])
    if not file:
        return "::".join(part for part in (classname, name) if part)
    module = re.sub(r"\.py$", "", file).replace("/", ".")
    inner = classname[len(module) + 1 :] if classname.startswith(module + ".") else ""
    return "::".join([file] + [part for part in inner.split(".") if part] + [name])


def outcome_of(wanted: str, found: Outcomes) -> str:
    """What a test that a record names came to.

    Records made from printed output cut names at their first space, and some name functions only.
    """
    if wanted in found:
        return found[wanted]
    # Records of some repositories have a path in a parameter without its directories, or a button by its number.
    shortened = [outcome for name, outcome in found.items() if "[" in name and shorter(name) == wanted]
    if shortened:
        return shortened[0]
    if "[" in wanted and not wanted.endswith("]"):
        matches = [outcome for name, outcome in found.items() if name.startswith(wanted)]
    elif "::" not in wanted:
        matches = [outcome for name, outcome in found.items() if name.rpartition("::")[2].partition("[")[0] == wanted]
    else:
        matches = [outcome for name, outcome in found.items() if name.startswith(wanted + "[")]
    if not matches:
        return "absent"
    worst = [outcome for outcome in matches if outcome not in GOOD]
    return worst[0] if worst else next(outcome for outcome in GOOD if outcome in matches)


def shorter(name: str) -> str:
    """A node id as the parsers of SWE-bench shorten it: `[/a/b/c.py]` is `[/c.py]`, and the left button is 1."""
    main, _, option = name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3").partition("[")
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return main + "[" + option


def judge(task: Task, found: Outcomes) -> dict[str, Any]:
    if task.get("expected") is not None:
        return compared(task, found)
    shares, right, total = {}, 0, 0
    for name, good in (("fail_to_pass", ("passed", "xfailed")), ("pass_to_pass", GOOD)):
        tests = task[name]
        passed = 0
        for test in tests:
            outcome = outcome_of(test, found)
            passed += outcome in good
            if outcome not in good:
                print(name, test, outcome)
        shares[name] = passed / len(tests) if tests else 1.0
        right += passed
        total += len(tests)
    resolved = float(right == total)
    reward = resolved if task["reward"] == "binary" else right / total
    return {"reward": reward, "components": dict(shares, resolved=resolved)}


def compared(task: Task, found: Outcomes) -> dict[str, Any]:
    """The reward where each test has to come to what is expected, and no other test may have been there."""
    words = {"passed": "PASSED", "failure": "FAILED", "error": "ERROR"}
    came = {}
    for name, outcome in found.items():
        if outcome in words:
            came[".".join(name.split("::")[1:]).split(" - ")[0]] = words[outcome]
    expected = task["expected"]
    for name in sorted(set(expected) | set(came)):
        if expected.get(name) != came.get(name):
            print(name, "came to", came.get(name), "instead of", expected.get(name))
    right = sum(came.get(name) == outcome for name, outcome in expected.items())
    resolved = float(came == expected)
    share = right / max(len(expected), len(came))
    return {
        "reward": resolved if task["reward"] == "binary" else share,
        "components": {"resolved": resolved, "as_expected": share},
    }


def kill_descendants() -> None:
    """Ends what the tests started and left: it is ours since its parents died."""
    while True:
        children = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open("/proc/" + entry + "/stat", encoding="utf-8", errors="replace") as file:
                        parent = int(file.read().rpartition(")")[2].split()[1])
                except (OSError, ValueError, IndexError):
                    continue
                if parent == os.getpid():
                    children.append(int(entry))
        if not children:
            return
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:
                pass
            try:
                os.waitpid(child, 0)
            except ChildProcessError:
                pass


if __name__ == "__main__":
    main()
