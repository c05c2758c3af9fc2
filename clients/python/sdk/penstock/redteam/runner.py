"""Runs attacks as rollouts of a deployment, bounded in time, number and resources."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, PenstockError, first_of
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import abandon, created
from penstock.client.tasks.spec import AgentChoice, Budgets, Limits, Mode, ModelSource, Resources, SandboxChoice
from penstock.client.types.results import AgentEvent, Ended, Outcome
from penstock.redteam import fixtures
from penstock.redteam.agents import NoCompiler, agent, beside, registered, spec_of
from penstock.redteam.attack import Attack, Grading, registry
from penstock.redteam.judging import Result, Seen, Verdict, judge
from penstock.redteam.tasks import SOLUTION, task_of
from penstock.redteam.watching import Watch

_OVER: Final = "the attack is over"
_LIMITS: Final = {
    "limit_memory": {"memory_bytes": 512 << 20},
    "limit_pids": {"pids": 256},
    "limit_disk": {"disk_bytes": 1 << 30},
    "limit_inodes": {"inodes": 50_000},
}
_PREPARE_S: Final = 180.0
_VERIFY_S: Final = 60.0
_SLACK_S: Final = 120.0
"""Seconds that a rollout may take beyond all of its limits: starting, killing, collecting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all attacks on a backend, in the given order."""

    backend: str
    results: tuple[Result, ...]

    def count(self, verdict: Verdict) -> int:
        """Returns the number of results with this verdict."""
        return sum(result.verdict is verdict for result in self.results)

    @property
    def held(self) -> bool:
        """Whether nothing is broken."""
        return self.count(Verdict.BROKEN) == 0


async def run(
    ps: Penstock,
    attacks: Sequence[Attack] | None = None,
    *,
    backend: str = "",
    user: str = "",
    source: ModelSource | None = None,
    concurrency: int = 2,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Runs attacks, each as a rollout per grading, and returns the results.

    Args:
        ps: a client with the operator's token: agents are registered (and unlisted at once).
        attacks: which; None = all of `registry()`.
        backend: where; empty = the operator's default.
        user: the account, if not the backend's ordinary user.
        source: answers model calls; None = the default inference service, or an endpoint of this program if there
            is none. An attack makes few calls or none.
        concurrency: attacks at a time, 1 to 8; resource-hungry ones always run alone.
        on_result: called with each result as soon as it is known.

    Raises:
        InvalidArgument: `ATTACKS`, the concurrency is out of range or there is no such backend.
        FailedPrecondition: `BACKEND_UNAVAILABLE`, with what to install or set; `ATTACK_BASELINE`, an agent that does
            nothing is not graded 0, or one that does the task not 1, so that the attacks would prove nothing here.
        PenstockError: the services cannot be reached or refuse.
    """
    if not 1 <= concurrency <= 8:
        raise InvalidArgument("concurrency must be 1 to 8", reason="ATTACKS")
    chosen = list(registry().values()) if attacks is None else list(attacks)
    async with contextlib.AsyncExitStack() as stack:
        field = await _field(ps, backend, user, source)
        try:
            await field.check_baseline()
        except FailedPrecondition as refused:
            if source is not None or refused.reason != "INFERENCE_UNKNOWN":
                raise
            # Services without an engine: an endpoint of this program answers instead.
            field = await _field(ps, backend, user, await stack.enter_async_context(fixtures.echo()))
            await field.check_baseline()
        return await _attack(field, chosen, concurrency, on_result)


async def _attack(
    field: "_Field", chosen: Sequence[Attack], concurrency: int, on_result: Callable[[Result], None]
) -> Report:
    jobs = [(attack, grading) for attack in chosen for grading in attack.grading]
    results: dict[int, Result] = {}
    places = asyncio.Semaphore(concurrency)

    async def one(position: int) -> None:
        async with places:
            results[position] = await field.attack(*jobs[position])
            on_result(results[position])

    async with field.watch:
        try:
            async with asyncio.TaskGroup() as group:
                for position, (attack, _) in enumerate(jobs):
                    if not attack.alone:
                        group.create_task(one(position))
        except BaseExceptionGroup as failed:
            raise first_of(failed) from None
        for position, (attack, _) in enumerate(jobs):
            if attack.alone:
                await one(position)
    return Report(backend=field.backend, results=tuple(results[position] for position in range(len(jobs))))


async def _field(ps: Penstock, backend: str, user: str, source: ModelSource | None) -> "_Field":
    known = {item.name: item for item in await ps.sandboxes.backends()}
    name = backend or next((item.name for item in known.values() if item.is_default), "")
    if name not in known:
        raise InvalidArgument(
            f"There is no backend {name}; known backends: {', '.join(sorted(known))}", reason="ATTACKS"
        )
    if not known[name].available:
        raise FailedPrecondition(f"{name}: {known[name].unavailable_reason}", reason="BACKEND_UNAVAILABLE")
    resources: dict[str, int] = {}
    for capability, limit in _LIMITS.items():
        if capability in known[name].capabilities:
            resources |= limit
    sandbox = SandboxChoice(backend=name, user=user, resources=Resources(**resources) if resources else None)
    options: RolloutOptions = {
        "mode": Mode.TRANSPARENT_PROXY,
        "run_id": f"redteam-{secrets.token_hex(6)}",
        "budgets": Budgets(max_calls=50),
        "sandbox": sandbox,
    }
    if source is not None:
        options["source"] = source
    # Without diffs the default is to grade in the agent's sandbox.
    forks = "diff" in known[name].capabilities
    return _Field(ps, name, options, Watch(ps), forks=forks, own_kernel="own_kernel" in known[name].capabilities)


class _Field:
    """The backend of a deployment under attack."""

    def __init__(
        self, ps: Penstock, backend: str, options: RolloutOptions, watch: Watch, *, forks: bool, own_kernel: bool
    ) -> None:
        self._ps = ps
        self.backend = backend
        self._options = options
        self._forks = forks
        self._own_kernel = own_kernel
        self.watch = watch

    async def check_baseline(self) -> None:
        """Raises FailedPrecondition `ATTACK_BASELINE`."""
        for script, wanted in ((":\n", 0.0), (_worker(), 1.0)):
            seen = Seen()
            choice = await registered(self._ps, agent("baseline", "Does nothing, or the task.", script))
            await self._rollout(choice, Grading.IN_PLACE, "sums", 60.0, seen)
            reward = None if seen.outcome is None or seen.outcome.reward is None else seen.outcome.reward.value
            if reward != wanted:
                raise FailedPrecondition(
                    f"An agent that {'does the task' if wanted else 'does nothing'} got {reward} and not {wanted:g}"
                    f" on {self.backend}: {_failure_text(seen.outcome)}",
                    reason="ATTACK_BASELINE",
                )

    async def attack(self, attack: Attack, grading: Grading) -> Result:
        """Runs one attack. Raises PenstockError if the services cannot be reached or refuse it."""
        begin = time.monotonic()
        reason = self._inapplicable(attack, grading)
        if reason:
            return Result(attack=attack, grading=grading, verdict=Verdict.NOT_APPLICABLE, reasons=(reason,))
        try:
            made = await asyncio.to_thread(spec_of, attack, own_kernel=self._own_kernel)
            choice = await registered(self._ps, made)
        except NoCompiler as missing:
            return Result(attack=attack, grading=grading, verdict=Verdict.NOT_APPLICABLE, reasons=(str(missing),))
        seen, rollout_id = Seen(), ""
        async with (
            fixtures.of(self._ps, attack) as options,
            self.watch.during(seen, growth=attack.expected.max_growth_bytes is not None),
            self._neighbour(attack, seen),
            self._beside(attack, seen),
        ):
            if attack.user:
                options["sandbox"] = replace(self._options["sandbox"], user=attack.user)
            try:
                rollout_id = await self._rollout(choice, grading, attack.task, attack.seconds, seen, options)
            except (FailedPrecondition, InvalidArgument) as error:
                if not attack.user:
                    raise
                seen.refused = error.reason, error.message
        verdict, reasons = judge(attack, seen, 0.0)
        reward = None if seen.outcome is None or seen.outcome.reward is None else seen.outcome.reward.value
        return Result(
            attack=attack,
            grading=grading,
            verdict=verdict,
            reasons=reasons,
            reward=reward,
            failure=_failure_text(seen.outcome),
            rollout_id=rollout_id,
            seconds=time.monotonic() - begin,
        )

    def _inapplicable(self, attack: Attack, grading: Grading) -> str:
        if not attack.applies_to(self.backend):
            return f"it is for {', '.join(attack.backends)}"
        if grading is Grading.FORK and not self._forks:
            return f"{self.backend} cannot grade in a fork"
        return ""

    @contextlib.asynccontextmanager
    async def _neighbour(self, attack: Attack, seen: Seen) -> AsyncIterator[None]:
        """Runs a rollout that does its work during the block, if the attack must not harm one."""
        if not attack.expected.neighbour:
            yield
            return
        beside = Seen()
        choice = await registered(self._ps, agent("neighbour", "Does the task.", _worker()))
        work = asyncio.create_task(self._rollout(choice, Grading.IN_PLACE, "sums", 60.0, beside))
        try:
            yield
            await work
            seen.neighbour = beside.outcome
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _beside(self, attack: Attack, seen: Seen) -> AsyncIterator[None]:
        """Runs the attack's agent in another sandbox; breaches that it finds count as the attack's."""
        if attack.beside is None:
            yield
            return
        other = Seen()
        choice = await registered(self._ps, beside(attack))
        work = asyncio.create_task(self._rollout(choice, Grading.IN_PLACE, "sums", attack.seconds + 60.0, other))
        ready = asyncio.create_task(other.has_tried.wait())
        try:
            await asyncio.wait([work] if attack.beside_ends else [work, ready], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            if not other.has_tried.is_set():
                seen.missing = (
                    f"the sandbox beside it was not ready: {'; '.join(other.reports) or _failure_text(other.outcome)}"
                )
            yield
            seen.reports += [f"broken: the sandbox beside it: {line}" for line in other.reported("broken")]
        finally:
            work.cancel()
            ready.cancel()
            await asyncio.gather(work, ready, return_exceptions=True)

    async def _rollout(
        self,
        choice: AgentChoice,
        grading: Grading,
        task: str,
        seconds: float,
        seen: Seen,
        further: RolloutOptions | None = None,
    ) -> str:
        options: RolloutOptions = {
            **self._options,
            **(further or {}),
            "limits": Limits(prepare=_PREPARE_S, agent=seconds, verify=_VERIFY_S),
        }
        creation = self._ps.rollouts.create(task_of(task, grading), choice, **options)
        handle = await created(creation, _OVER)
        try:
            async with asyncio.timeout(_PREPARE_S + seconds + _VERIFY_S + _SLACK_S):
                async for event in handle.events():
                    if isinstance(event.payload, AgentEvent):
                        seen.hear(str(event.payload.data.get("line", "")))
                    elif isinstance(event.payload, Ended):
                        seen.outcome = event.payload.outcome
        except TimeoutError:
            await abandon(handle, _OVER)
        except BaseException:
            await abandon(handle, _OVER)
            raise
        with contextlib.suppress(PenstockError):
            await handle.delete()  # a rollout that is still ending is kept: it is the operator's evidence
        return handle.rollout_id


def _worker() -> str:
    return f"cat >work.sh <<'END'\n{SOLUTION}END\n"


def _failure_text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "it did not end"
    return "" if outcome.failure is None else f"{outcome.failure.reason}: {outcome.failure.message}"
