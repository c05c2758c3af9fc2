"""Runs the verifier's commands in the sandbox and reads the reward, after the agent and its processes are dead.

Invariants: the verifier's files are written now, over whatever is in their place, which is removed first, links not
followed (R72, R75). The reward file is new, at a path that could not be known before. All processes of a command are
dead before the next one starts, and each command has its own reward file. The verifier's environment has neither the
task's nor the agent's variables (R10). A reward that is not finite or not in its declared range is a failure of the
verifier, never clipped and never zero (R73, R74).
"""

from __future__ import annotations

import io
import json
import math
import secrets
import struct
import tarfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from penstock_chassis.errors import FailedPrecondition, NotFound, PermissionDenied
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.domain.failures import OF_THE_SANDBOX, describe, of_the_agent
from penstock_driver.domain.ports import CommandResult, ExitReason, Sandboxes
from penstock_driver.domain.rollout import (
    TAIL_BYTES,
    Cause,
    CommandFinished,
    Component,
    Phase,
    Reward,
    RolloutFailed,
    TurnReward,
    Verifier,
    failed,
)
from penstock_driver.domain.validation import MAX_COMPONENTS
from penstock_driver.grading.judge import JudgeAccess

REWARD_VARIABLE: Final = "PENSTOCK_REWARD_FILE"
MAX_REWARD_BYTES: Final = 64 << 10
MAX_NAME: Final = 256
MAX_TURNS: Final = 1024
OUTPUT_LIMIT: Final = 2 * TAIL_BYTES
_OF_A_TURN: Final = frozenset(("reward", "components", "tokens"))
_MAX_INDEX: Final = (1 << 31) - 1
_OF_NUMBERS: Final = frozenset("0123456789+-.eE")
_NOT_FINITE: Final = frozenset(("nan", "inf", "infinity"))


async def verify(
    sandboxes: Sandboxes,
    sandbox_id: str,
    workdir: str,
    verifier: Verifier,
    record: Callable[[CommandFinished], None],
    *,
    takes_files: bool = False,
    judge: JudgeAccess | None = None,
) -> Reward:
    """Run the verifier and return its reward; RolloutFailed (VERIFIER, AGENT, INFRASTRUCTURE) when it gives none.

    Every command runs, whatever the results of the others; each is recorded. `takes_files` as in `SandboxFacts`. The
    last command may ask the `judge`: those before it may run the agent's code.
    """
    with of_the_agent():
        return await _verified(sandboxes, sandbox_id, workdir, verifier, record, takes_files=takes_files, judge=judge)


async def _verified(
    sandboxes: Sandboxes,
    sandbox_id: str,
    workdir: str,
    verifier: Verifier,
    record: Callable[[CommandFinished], None],
    *,
    takes_files: bool,
    judge: JudgeAccess | None,
) -> Reward:
    # Two paths, because processes beside the verifier can see the path of the caches.
    reward_path, caches = f"{_scratch()}/reward", _scratch()
    reward_file = FileToWrite(reward_path, b"", 0o600)
    with _files_refused():
        if verifier.files:
            files = [replace(file, path=_absolute(workdir, file.path)) for file in verifier.files]
            await sandboxes.put_layer(sandbox_id, "/", _layer(files))
        if verifier.reward_by_file:
            if not verifier.fresh_fork:
                # Written at its maximum size: a lack of room left by the agent shows before the file is needed.
                await sandboxes.write_files(sandbox_id, [replace(reward_file, content=bytes(MAX_REWARD_BYTES))])
            if not takes_files:
                await sandboxes.write_files(sandbox_id, [reward_file])

    passed, cut_short, process_ids = 0, "", list[str]()
    result: CommandResult | None = None
    last = len(verifier.commands) - 1
    for index, command in enumerate(verifier.commands):
        if result is not None:
            # A command may have run the agent's code: none of it may live on beside the next one.
            await _kill_all(sandboxes, sandbox_id, process_ids[-1], result)
            if verifier.reward_by_file:
                reward_file = await _handed_on(sandboxes, sandbox_id, reward_path, result)
                reward_path = reward_file.path
                if not takes_files:
                    await sandboxes.write_files(sandbox_id, [reward_file])
        reward_environment = {REWARD_VARIABLE: reward_path} if verifier.reward_by_file else {}
        bounded = replace(
            command,
            env={**_defences(caches), **command.env, **reward_environment},
            timeout_s=verifier.command_timeout_s if command.timeout_s is None else command.timeout_s,
        )
        if judge is not None and index == last:
            bounded = judge.given_to(bounded)
        process_ids.append(_process_id(index))
        run = partial(
            sandboxes.run,
            sandbox_id,
            command=bounded,
            output_limit=OUTPUT_LIMIT,
            kill_all_after=verifier.reward_by_file or index < last,
            result_file=(reward_path, MAX_REWARD_BYTES) if verifier.reward_by_file else None,
        )
        if verifier.reward_by_file and takes_files:
            result = await _run_with(sandboxes, sandbox_id, reward_file, partial(run, process_ids[-1]))
        else:
            result = await run(process_ids[-1])
        if result.exit.reason is ExitReason.START_FAILED:
            # The agent or an earlier command may have removed or locked the start directory.
            await sandboxes.put_layer(sandbox_id, workdir, _layer(()))
            process_ids[-1] = f"{_process_id(index)}-again"
            result = await run(process_ids[-1])
        record(CommandFinished.of(Phase.VERIFYING, index, command, result))
        if result.exit.reason in (ExitReason.START_FAILED, ExitReason.SANDBOX_LOST, ExitReason.KILLED):
            message = f"verifier command {index} could not be run: {result.exit.reason}: {result.exit.message}"
            if result.exit.reason is ExitReason.START_FAILED:  # never the infrastructure's fault: an agent can cause it
                raise _failure("VERIFIER_START_FAILED", message)
            raise failed(
                Cause.INFRASTRUCTURE,
                "VERIFIER_NOT_RUN",
                message,
                Phase.VERIFYING,
                retriable=True,
                component=Component.SANDBOX,
            )
        passed += result.exit.ok
        if result.exit.reason is not ExitReason.EXITED:
            cut_short = cut_short or f"verifier command {index} was ended ({describe(result.exit)})"
    if not verifier.reward_by_file:
        return in_range(passed_share(verifier, passed), verifier, {})
    # Only the reward of a verifier that came to its own end counts, and none of its processes may write to it later.
    assert result is not None
    await _kill_all(sandboxes, sandbox_id, process_ids[-1], result)
    if cut_short:
        raise _failure("VERIFIER_CUT_SHORT", f"{cut_short}: its output is not a reward")
    return await _reward_of_file(sandboxes, sandbox_id, reward_path, result, verifier)


@contextmanager
def _files_refused() -> Iterator[None]:
    """Turns the errors of writing the verifier's files into its failure."""
    try:
        yield
    except (PermissionDenied, FailedPrecondition) as error:
        if error.reason in OF_THE_SANDBOX:
            raise
        raise _failure("VERIFIER_FILES_REFUSED", f"the verifier's files cannot be written: {error.message}") from error


async def _run_with(
    sandboxes: Sandboxes, sandbox_id: str, file: FileToWrite, run: Callable[..., Awaitable[CommandResult]]
) -> CommandResult:
    """Run a command that brings its reward file along; if that is refused, write it before: an error then says why."""
    try:
        return await run(files=[file])
    except (PermissionDenied, FailedPrecondition) as error:
        if error.reason in OF_THE_SANDBOX:
            raise
    with _files_refused():
        await sandboxes.write_files(sandbox_id, [file])
    return await run()


async def _kill_all(sandboxes: Sandboxes, sandbox_id: str, process_id: str, result: CommandResult) -> None:
    """Kill what a command left running, unless its sandbox service has done so."""
    if not result.exit.all_killed:
        await sandboxes.kill(sandbox_id, process_id, everything=True)


async def _left(sandboxes: Sandboxes, sandbox_id: str, path: str, result: CommandResult) -> tuple[bytes, int]:
    """The reward file that a command left, and its size; only what was read after everything was killed counts."""
    if result.result_file is not None and result.exit.all_killed:
        return result.result_file.content, result.result_file.size_bytes
    return await sandboxes.read_file(sandbox_id, path, MAX_REWARD_BYTES)


def _scratch() -> str:
    """A directory in the sandbox with an unguessable name."""
    return f"/tmp/penstock-{secrets.token_hex(16)}"  # noqa: S108


async def _handed_on(sandboxes: Sandboxes, sandbox_id: str, path: str, result: CommandResult) -> FileToWrite:
    """The reward left by a command, as a new file for the next one.

    A file that is no longer a regular reward file, or is too large, is passed on as an empty one.
    """
    content, size = b"", 0
    try:
        content, size = await _left(sandboxes, sandbox_id, path, result)
    except (NotFound, FailedPrecondition, PermissionDenied) as error:
        if error.reason in OF_THE_SANDBOX:
            raise
    return FileToWrite(f"{_scratch()}/reward", content if size <= MAX_REWARD_BYTES else b"", 0o600)


async def _reward_of_file(
    sandboxes: Sandboxes, sandbox_id: str, path: str, result: CommandResult, verifier: Verifier
) -> Reward:
    try:
        content, size = await _left(sandboxes, sandbox_id, path, result)
    except (NotFound, FailedPrecondition, PermissionDenied) as error:
        if error.reason in OF_THE_SANDBOX:
            raise
        message = f"the verifier removed, replaced or locked its reward file: {error}"
        raise _failure("REWARD_FILE_ABSENT", message) from error
    if size > MAX_REWARD_BYTES:
        raise _failure("REWARD_INVALID", f"the reward file has {size} bytes; at most {MAX_REWARD_BYTES} are allowed")
    parsed = parse_reward(content)
    return replace(in_range(parsed.value, verifier, parsed.components), turns=parsed.turns)


class ParsedReward(NamedTuple):
    """What a verifier wrote. The turns are in its order, each of another call."""

    value: float
    components: Mapping[str, float] = MappingProxyType({})
    turns: tuple[TurnReward, ...] = ()


def parse_reward(content: bytes) -> ParsedReward:
    """The reward of a file: one number, or {"reward": NUMBER, "components": {NAME: NUMBER}, "turns": [TURN]}, where a
    turn is {"call": INDEX, "reward": NUMBER, "components": {NAME: NUMBER}, "tokens": [NUMBER]}.

    RolloutFailed (VERIFIER): REWARD_ABSENT, REWARD_INVALID, REWARD_OUT_OF_RANGE for a number that is not finite.
    """
    text = content.strip()
    if not text:
        raise _failure("REWARD_ABSENT", "the verifier wrote no reward")
    if text[:1] != b"{":
        return ParsedReward(_parsed_number(text.decode("ascii", "replace")))
    try:
        data = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=float)
    except (ValueError, RecursionError) as error:
        raise _failure("REWARD_INVALID", f"the reward file is not JSON: {error}") from None
    if set(data) - {"reward", "components", "turns"} or "reward" not in data:
        raise _failure("REWARD_INVALID", 'expected {"reward": NUMBER} and optionally "components" and "turns"')
    return ParsedReward(_finite(data["reward"], "the reward"), _components(data), _turns(data.get("turns", [])))


def _turns(items: Any) -> tuple[TurnReward, ...]:
    if not isinstance(items, list) or len(items) > MAX_TURNS:
        raise _failure("REWARD_INVALID", f"turns: expected a list of at most {MAX_TURNS}")
    turns = tuple(_turn(item, f"turns[{index}]") for index, item in enumerate(items))
    calls = Counter(turn.call_index for turn in turns)
    if repeated := [call for call, count in calls.items() if count > 1]:
        raise _failure("REWARD_INVALID", f"turns: call {repeated[0]} is there twice")
    return turns


def _turn(item: Any, where: str) -> TurnReward:
    if not isinstance(item, dict) or set(item) - {"call", *_OF_A_TURN} or not set(item) & _OF_A_TURN:
        message = f'{where}: expected {{"call": INDEX}} and "reward", "components" or "tokens"'
        raise _failure("REWARD_INVALID", message)
    call, value, tokens = item.get("call"), item.get("reward"), item.get("tokens", [])
    if not isinstance(call, int) or isinstance(call, bool) or not 0 <= call <= _MAX_INDEX:
        raise _failure("REWARD_INVALID", f"{where}.call: expected the index of a call, from 0")
    if not isinstance(tokens, list):
        raise _failure("REWARD_INVALID", f"{where}.tokens: expected a list of numbers")
    numbers = [_finite(number, f"a number of {where}.tokens") for number in tokens]
    try:
        values = struct.pack(f"<{len(numbers)}f", *numbers)
    except OverflowError:
        raise _failure("REWARD_OUT_OF_RANGE", f"{where}.tokens has a number beyond those of float32") from None
    reward = None if "reward" not in item else _finite(value, f"{where}.reward")
    return TurnReward(reward, _components(item, f"{where}."), values, call)


def _components(holder: Mapping[str, Any], where: str = "") -> dict[str, float]:
    components = holder.get("components", {})
    if not isinstance(components, dict) or len(components) > MAX_COMPONENTS:
        raise _failure("REWARD_INVALID", f"{where}components: expected an object of at most {MAX_COMPONENTS} numbers")
    for name in components:
        _check_name(name)
    return {name: _finite(value, f"{where}component {name!r}") for name, value in components.items()}


def _check_name(name: str) -> None:
    """Reject names that are not valid text: an agent may supply them, and JSON permits half a surrogate pair."""
    if len(name) > MAX_NAME or not name.isprintable():
        problem = f"expected at most {MAX_NAME} printable characters as a component's name"
        raise _failure("REWARD_INVALID", f"components: {problem}, not {name[: 2 * MAX_NAME]!r}")


def _parsed_number(text: str) -> float:
    if text.lstrip("+-").lower() in _NOT_FINITE:
        raise _failure("REWARD_OUT_OF_RANGE", f"the reward is not finite: {text}")
    try:
        if set(text) <= _OF_NUMBERS:
            return _finite(float(text), "the reward")
    except ValueError:
        pass  # reported below
    raise _failure("REWARD_INVALID", f"the reward is not a number: {text[:80]!r}")


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _failure("REWARD_INVALID", f"{what[:300]}: expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _failure("REWARD_OUT_OF_RANGE", f"{what[:300]} is not finite")
    return number


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError for a repeated name, since parsers differ in which value they keep."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return found


def passed_share(verifier: Verifier, passed: int) -> float:
    """The reward of a verifier of whose commands `passed` passed: in its range, with both ends exact."""
    low, high = verifier.range_min, verifier.range_max
    if passed == 0:
        return low
    if passed == len(verifier.commands):
        return high
    # Not `high - low`, which may be infinite. The sum is rounded, and may so be just outside.
    share = passed / len(verifier.commands)
    return min(high, max(low, low * (1 - share) + high * share))


def in_range(value: float, verifier: Verifier, components: Mapping[str, float]) -> Reward:
    """The reward, if it and its components are finite and in their declared ranges, and no component is missing."""
    if not math.isfinite(value) or not verifier.range_min <= value <= verifier.range_max:
        raise _failure(
            "REWARD_OUT_OF_RANGE", f"the reward {value} is not in [{verifier.range_min}, {verifier.range_max}]"
        )
    ranges = verifier.component_ranges
    if ranges and components.keys() != ranges.keys():
        differing = ", ".join(sorted(components.keys() ^ ranges.keys()))
        raise _failure("REWARD_INVALID", f"components: missing, or not declared: {differing[:500]}")
    for name, (low, high) in ranges.items():
        if not low <= components[name] <= high:
            raise _failure("REWARD_OUT_OF_RANGE", f"component {name} is {components[name]}, not in [{low}, {high}]")
    return Reward(value, verifier.range_min, verifier.range_max, components)


def _process_id(index: int) -> str:
    return f"verifier-{index}"


def _defences(caches: str) -> Mapping[str, str]:
    """Environment that keeps common programs from reading files that an agent may have planted.

    Python reads no compiled module from the tree (one may be marked as not to be compared with its source), and git
    runs no hook. A command's own environment takes precedence.
    """
    return {
        "PYTHONPYCACHEPREFIX": caches,
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": "/dev/null",
        "GIT_CONFIG_KEY_1": "core.fsmonitor",
        "GIT_CONFIG_VALUE_1": "false",
    }


def _layer(files: Iterable[FileToWrite]) -> io.BytesIO:
    """A tar of files with absolute paths, names relative to the root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(file.path.lstrip("/"))
            member.size, member.mode = len(file.content), file.mode
            tar.addfile(member, io.BytesIO(file.content))
    buffer.seek(0)
    return buffer


def _absolute(workdir: str, path: str) -> str:
    return path if path.startswith("/") else f"{workdir}/{path}"


def invalid_reward(message: str) -> RolloutFailed:
    """The failure of a verifier whose reward file cannot be right (REWARD_INVALID)."""
    return _failure("REWARD_INVALID", message)


def _failure(reason: str, message: str) -> RolloutFailed:
    return failed(Cause.VERIFIER, reason, message, Phase.VERIFYING)
