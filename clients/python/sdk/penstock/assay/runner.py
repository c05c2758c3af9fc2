"""Assays tasks: trials in their order, each only if those before it make sense, and what they show.

Invariants: every trial is an ordinary rollout, so that a task is judged by what grades its agents; all trials of a task
start from one prepared state; a task without a finding of severity `defect` passed.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from penstock.assay import judging, leaks
from penstock.assay.attacks import attacks
from penstock.assay.model import Assay, Code, Finding, Kind, Severity, Trial
from penstock.assay.mutations import answer_blocks, mutants
from penstock.assay.reversed_tests import reversed_order, uses_pytest
from penstock.assay.trials import Trials
from penstock.client.connection import Penstock
from penstock.client.errors import InvalidArgument, first_of
from penstock.client.rollouts.client import RolloutOptions, over
from penstock.client.tasks.spec import SandboxChoice
from penstock.client.tasks.task import Task
from penstock.client.wire.specs import digest
from penstock.tasks.scripts import MAX_SCRIPT_BYTES, of_solution
from penstock.tasks.solutions import solving_agent, without_calls

_T = TypeVar("_T")
_NOTHING: Final = ":\n"
_IDLE_TRIALS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is tried on each task.

    Attributes:
        solutions: trials of the solution, 1 to 100.
        mutants: at most so many mutated solutions, 0 to 1,000.
        attacks: whether the reward attacks are tried.
        accept: codes of defects that are only warnings, such as `REWARD_FORGED`.
        fail_fast: whether a task's assay ends at the first kind of trial that shows a defect.
    """

    solutions: int = 5
    mutants: int = 12
    attacks: bool = True
    accept: Collection[Code] = ()
    fail_fast: bool = False


async def assay(
    ps: Penstock,
    tasks: Sequence[Task],
    terms: Terms | None = None,
    *,
    concurrency: int = 4,
    options: RolloutOptions | None = None,
    ended: Callable[[Assay], None] = lambda _: None,
) -> list[Assay]:
    """Assays tasks, and returns their results in the order of the tasks.

    Args:
        ps: the services; what it needs of them is what `penstock tasks prove` needs.
        tasks: those with an image of their own as `with_image` returns them.
        terms: what is tried; default: all.
        concurrency: rollouts at once.
        options: of the rollouts.
        ended: called with each result as soon as it is known.

    Raises:
        The errors of `ps.rollouts.create`, but for those of a single task, which are findings.
    """
    given: RolloutOptions = {"max_attempts": 3, **without_calls(options)}
    given["run_id"] = f"assay-{secrets.token_hex(6)}"
    trials = Trials(ps, await solving_agent(ps), given, concurrency)
    chosen = terms or Terms()
    found: dict[int, Assay] = {}
    # A task's own trials leave places free only at their edges, so that few tasks at once fill all.
    places = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task) -> None:
        async with places:
            found[index] = await _Work(trials, task, chosen, given.get("sandbox")).result()
        ended(found[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index, task in enumerate(tasks):
                group.create_task(one(index, task))
    except BaseExceptionGroup as failed:
        raise first_of(failed) from None
    return [found[index] for index in range(len(tasks))]


class _Work:
    """The assay of one task."""

    def __init__(self, trials: Trials, task: Task, terms: Terms, sandbox: SandboxChoice | None) -> None:
        self._trials = trials
        self._task = task
        self._terms = terms
        self._backend = (over(sandbox, task.sandbox) or SandboxChoice()).backend
        self._solution = "" if task.solution is None else of_solution(task.solution)
        self._ran: list[Trial] = []
        self._size: tuple[int, int] | None = None

    async def result(self) -> Assay:
        begin = time.monotonic()
        found: list[Finding] = []
        try:
            async with aclosing(self._parts()) as findings:
                async for part in findings:
                    found.extend(part)
                    if self._terms.fail_fast and any(map(self._is_defect, part)):
                        break
        except (InvalidArgument, BaseExceptionGroup) as error:
            # Of this task's own spec: what is wrong with the services ends the whole assay.
            cause = first_of(error) if isinstance(error, BaseExceptionGroup) else error
            if not isinstance(cause, InvalidArgument):
                raise
            found.append(Finding(code=Code.SETUP_FAILS, severity=Severity.DEFECT, message=str(cause)))
        found += judging.failed_trials(self._ran)
        accepted = [item if self._is_defect(item) else replace(item, severity=Severity.WARNING) for item in found]
        files, size_bytes = self._size or (None, None)
        return Assay(
            task_id=self._task.task_id,
            digest=digest(self._task),
            findings=tuple(sorted(accepted, key=lambda item: item.severity is not Severity.DEFECT)),
            trials=tuple(self._ran),
            setup_seconds=max((trial.setup_seconds for trial in self._ran), default=0.0),
            seconds=time.monotonic() - begin,
            files=files,
            size_bytes=size_bytes,
            backend=self._backend,
        )

    def _is_defect(self, finding: Finding) -> bool:
        return finding.severity is Severity.DEFECT and finding.code not in self._terms.accept

    async def _parts(self) -> AsyncGenerator[Sequence[Finding], None]:
        """Yields what each kind of trial shows, the cheaper ones first."""
        task = self._task
        if task.verifier is None:
            yield [_defect(Code.VERIFIER_MISSING, "it has no verifier")]
            return
        if task.solution is None:
            yield [_defect(Code.SOLUTION_MISSING, "it has no solution, so that nothing shows that it can be done")]
            return
        if len(self._solution.encode()) > MAX_SCRIPT_BYTES:
            text = f"its solution has more than {MAX_SCRIPT_BYTES} bytes, which an assay cannot put in place"
            yield [_defect(Code.SOLUTION_MISSING, text)]
            return
        first = await self._try(Kind.SOLUTION, "solution 1", self._solution, keep_diff=True)
        yield list(judging.of_solution(task, await self._again(first)))
        idle = await self._idle()
        yield list(judging.of_nothing(task, idle))
        if not judging.is_top(task, first):
            return  # without a solution that passes, neither mutants nor orders show anything
        untried = [attack.name for attack in attacks() if attack.needs_files] if self._terms.attacks else []
        yield list(judging.of_change(first, untried))
        look = await self._try(Kind.VIEW, "search for the answer", leaks.script(task, first.diff or ""))
        self._size = leaks.size(look.reports)
        yield list(leaks.findings(look.reports))
        if uses_pytest(task.verifier):
            other = replace(task, verifier=reversed_order(task.verifier))
            trial = await self._try(Kind.ORDER, "tests in the reverse order", self._solution, task=other)
            yield list(judging.of_order(task, trial))
        yield await self._mutated(first.diff)
        yield await self._attacked(first.diff, idle)

    async def _again(self, first: Trial) -> list[Trial]:
        """Repeats the solution: the first trial showed whether it passes, these whether it always does."""
        number = self._terms.solutions
        further = [self._try(Kind.SOLUTION, f"solution {index}", self._solution) for index in range(2, number + 1)]
        return [first, *await _all(further)]

    async def _idle(self) -> list[Trial]:
        return await _all(self._try(Kind.NOTHING, f"nothing {index}", _NOTHING) for index in range(1, _IDLE_TRIALS + 1))

    async def _mutated(self, diff: str | None) -> list[Finding]:
        if not self._terms.mutants:
            return []
        chosen = mutants(diff or "", self._terms.mutants)
        if not chosen:
            why = "the solution changes no text of the working directory that could be left out"
            text = f"no mutated solutions: {why if diff is not None else 'what the solution changes could not be read'}"
            return [Finding(code=Code.NOT_MUTATED, severity=Severity.WARNING, message=text)]
        ran = await _all(self._try(Kind.MUTANT, mutant.name, f"{self._solution}\n{mutant.script}") for mutant in chosen)
        seen = [(trial, mutant.is_block, mutant.shown) for trial, mutant in zip(ran, chosen, strict=True)]
        return list(judging.of_mutants(self._task, seen))

    async def _attacked(self, diff: str | None, idle: Sequence[Trial]) -> list[Finding]:
        if not self._terms.attacks:
            return []
        paths = list(dict.fromkeys(block.path for block in answer_blocks(diff or "")))[:50]
        rewards = [trial.reward for trial in idle if trial.reward is not None]
        nothing = max(rewards, default=judging.bottom_of(self._task))
        chosen = [attack for attack in attacks() if diff is not None or not attack.needs_files]
        ran = await _all(self._try(Kind.ATTACK, attack.name, attack.script(paths)) for attack in chosen)
        pairs = zip(ran, chosen, strict=True)
        return [item for trial, attack in pairs for item in judging.of_attack(trial, attack.tries, nothing)]

    async def _try(
        self, kind: Kind, name: str, script: str, *, task: Task | None = None, keep_diff: bool = False
    ) -> Trial:
        trial = await self._trials.run(task or self._task, kind, name, script, keep_diff=keep_diff)
        self._ran.append(trial)
        return trial


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Runs all at once; a failure of one cancels the others."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(item) for item in work]
    return [item.result() for item in running]


def _defect(code: Code, message: str) -> Finding:
    return Finding(code=code, severity=Severity.DEFECT, message=message)
