"""The model that a verifier asks: opened at the gate after the agent's end, for the verifier's last command alone.

The gate answers a question that it has answered before with the same answer. So a next process of this driver opens the
same judge, begins to grade again, and nothing is sampled or counted twice (decision 082).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import structlog

from penstock_chassis.errors import NotFound, PenstockError
from penstock_driver.agents.specs import Dialect
from penstock_driver.domain.failures import failure_of
from penstock_driver.domain.ports import Command, Gate, GateOpening, ModelRequest
from penstock_driver.domain.rollout import Cause, Component, Failure, Phase, RolloutFailed, judge_id

NAMELESS_MODEL: Final = "model"
"""The model name given to a program when the source has none, such as a bare tokenizer."""
Work: TypeAlias = Callable[[], Awaitable[GateOpening | None]]
Insisting: TypeAlias = Callable[[Work], Awaitable[GateOpening | None]]
"""Does the work again while that may help."""
_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """How a command asks the judge: the base URL for SDKs of Chat Completions, the key, and the model's name."""

    url: str
    key: str = field(repr=False)
    model: str

    def given_to(self, command: Command) -> Command:
        """The command with them in its environment."""
        return replace(
            command,
            env={**command.env, "PENSTOCK_JUDGE_URL": self.url, "PENSTOCK_JUDGE_MODEL": self.model},
            secret_env={**command.secret_env, "PENSTOCK_JUDGE_KEY": self.key},
        )


class Judge:
    """The judge of one attempt. Closing the rollout at the gate closes it too.

    Args:
        gate: that of the rollout.
        request: what to open.
        port: of 127.0.0.1 in the verifier's sandbox, where the gate is.
    """

    def __init__(self, gate: Gate, request: ModelRequest, port: int) -> None:
        self._gate = gate
        self._request = request
        self._port = port
        self._opening: GateOpening | None = None
        self.may_be_open = False
        """Whether the gate may have it, so that it is to be closed: also if the request to open it was interrupted."""

    @property
    def is_open(self) -> bool:
        """Whether the gate is known to have it."""
        return self._opening is not None

    async def open(self, insisting: Insisting) -> str:
        """Open it; return the address that the verifier's sandbox reaches. `insisting` waits for a full gate.

        RolloutFailed (GATE_LOST: the gate closed it meanwhile, or does not know the rollout any more; others of the
        gate).
        """
        self.may_be_open = True
        try:
            self._opening = await insisting(lambda: self._gate.open_judge(self._request))
        except NotFound as error:
            raise _lost("the gate does not know the rollout any more") from error
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, Phase.VERIFYING, Component.GATE)) from error
        if self._opening is None:
            raise _lost("the gate closed it: this driver was away for longer than the gate's driver_lease_s")
        return self._opening.ingress_address

    @property
    def access(self) -> JudgeAccess | None:
        """How to ask it; None before it is open."""
        if self._opening is None:
            return None
        url = f"http://127.0.0.1:{self._port}{self._opening.base_paths[Dialect.CHAT_COMPLETIONS]}"
        return JudgeAccess(url, self._opening.token, self._opening.model_name or NAMELESS_MODEL)

    async def explained(self, failure: Failure) -> Failure:
        """A verifier's failure, or JUDGE_UNANSWERED where its judge gave no answer, which says nothing of the work."""
        if not self.is_open or failure.cause is not Cause.VERIFIER:
            return failure
        try:
            answered = await self._gate.answered(judge_id(self._request.rollout_id))
        except PenstockError as error:
            _log.warning("the judge's calls cannot be counted", rollout_id=self._request.rollout_id, error=repr(error))
            return failure
        if not answered.lost:  # a question that is refused as such is the verifier's own
            return failure
        why = f" (the last: {answered.last_failure})" if answered.last_failure else ""
        message = f"{answered.unanswered} of {answered.calls} calls to the judge were not answered{why}"
        return Failure(
            Cause.MODEL,
            "JUDGE_UNANSWERED",
            f"{message}, and then: {failure.message}",
            not answered.is_final,
            Phase.VERIFYING,
        )


def _lost(why: str) -> RolloutFailed:
    message = f"the verifier cannot ask its judge: {why}"
    return RolloutFailed(
        Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, Phase.VERIFYING, component=Component.GATE)
    )
