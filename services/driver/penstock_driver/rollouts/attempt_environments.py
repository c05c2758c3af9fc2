"""The prepared states of an attempt: where its agent starts, and where its verifier does. Setup becomes events."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_driver.domain.failures import check_failure, setup_failure
from penstock_driver.domain.ports import CommandReport
from penstock_driver.domain.rollout import (
    Cause,
    CommandFinished,
    Component,
    Phase,
    Progress,
    RolloutFailed,
    RolloutSpec,
    failed,
)
from penstock_driver.environments.prepare import (
    PreparedEnvironment,
    SetupFailed,
    for_verifier,
    setup_of,
)
from penstock_driver.environments.throttle import never
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.recorder import RolloutRecorder


class AttemptEnvironments:
    """The environments of one attempt, shared with all rollouts that want the same."""

    def __init__(self, spec: RolloutSpec, services: RunnerServices, recorder: RolloutRecorder) -> None:
        self._spec = spec
        self._environments = services.environments
        self._has_room_elsewhere = services.has_room_elsewhere
        self._recorder = recorder

    async def for_agent(self, *, again: bool = False) -> PreparedEnvironment:
        """Return the prepared state of the agent's sandbox; made `again` if the sandbox service evicted it.

        Raises RolloutFailed, PenstockError.
        """
        prepared = await self._prepared(self._spec, again=again)
        if not again:
            self._record_setup(prepared.reports)
        return prepared

    async def for_verifier(self, prepared: PreparedEnvironment, *, again: bool = False) -> PreparedEnvironment:
        """Return the state to grade in: the agent's, `prepared`, unless the verifier has another sandbox.

        Raises as `for_agent`.
        """
        spec = for_verifier(self._spec)
        return prepared if spec is self._spec else await self._prepared(spec, again=again)

    async def _prepared(self, spec: RolloutSpec, *, again: bool = False) -> PreparedEnvironment:
        # Once its agent has run, an attempt cannot go elsewhere.
        may_move = self._recorder.progress.phase < Phase.RUNNING
        try:
            return await self._environments.get(
                spec,
                lambda line: self._recorder.append(Progress(line)),
                again=again,
                has_room_elsewhere=self._has_room_elsewhere if may_move else never,
            )
        except SetupFailed as error:
            raise self._setup_failure(error) from error
        except TimeoutError:
            message = f"preparing took longer than {self._spec.limits.prepare_s:g} s and the setup's limit"
            raise failed(
                Cause.INFRASTRUCTURE,
                "PREPARE_TIMED_OUT",
                message,
                self._recorder.progress.phase,
                retriable=True,
                component=Component.SANDBOX,
            ) from None

    def _record_setup(self, reports: Iterable[CommandReport]) -> None:
        commands = setup_of(self._spec.task, self._spec.limits)
        for report in reports:
            event = CommandFinished.of(Phase.SETTING_UP, report.index, commands[report.index], report.result)
            self._recorder.append(event)

    def _setup_failure(self, error: SetupFailed) -> RolloutFailed:
        if error.check:
            return RolloutFailed(check_failure(error.check.result, self._recorder.progress.phase))
        if self._recorder.progress.phase < Phase.SETTING_UP:  # else the verifier's state had to be made again
            self._recorder.enter(Phase.SETTING_UP)
            self._record_setup(error.reports)
        message, count = str(error), len(self._spec.task.setup)
        if error.reports:
            message = setup_failure(error.reports[-1].result, len(error.reports) - 1, count)
        return failed(Cause.TASK, "SETUP_FAILED", message, self._recorder.progress.phase)
