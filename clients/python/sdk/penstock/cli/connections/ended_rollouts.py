"""Saves the trajectories of rollouts as they end, and adds up what their calls used.

Invariants: one trajectory is in memory at a time, but for the one that is shown; the error of one rollout leaves the
others; what was interrupted can be finished.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.analysis.export import write_jsonl
from penstock.analysis.prices import Used, by_model, paid
from penstock.client import CallFinished, Ended, FailedPrecondition, Outcome, Penstock, RolloutEvent, Trajectory
from penstock.client.errors import PenstockError, first_of


class EndedRollouts:
    """The rollouts of one command that have ended.

    Args:
        ps: the services.
        folder: where each rollout gets a directory.
        keep: whether `trajectories` keeps them: for one rollout, which is shown.
    """

    def __init__(self, ps: Penstock, folder: Path, *, keep: bool) -> None:
        self.outcomes: dict[str, Outcome] = {}
        """In the order of their end."""
        self.saved: set[str] = set()
        """Those with a trajectory that is saved: there is none where the gate was never opened."""
        self.trajectories: dict[str, Trajectory] = {}
        self.errors: dict[str, PenstockError | OSError] = {}
        """Of those that could not be saved."""
        self._ps = ps
        self._folder = folder
        self._keep = keep
        self._unsaved: dict[str, None] = {}
        self._more = asyncio.Event()
        self._is_complete = False
        self._paid: defaultdict[str, dict[str, Used]] = defaultdict(dict)
        """Of rollouts that are not saved, by the call that was sampled."""
        self._used: dict[str, Sequence[Used]] = {}

    def add(self, event: RolloutEvent) -> None:
        """Notes what an event says; a rollout that has ended is saved while `saving` is open."""
        match event.payload:
            case CallFinished(call):
                # From the events: a trajectory lacks the calls of earlier attempts that were not replayed.
                for call_id, tokens in paid([call]).items():
                    self._paid[event.rollout_id].setdefault(call_id, tokens)
            case Ended(outcome):
                self.outcomes[event.rollout_id] = outcome
                self._unsaved[event.rollout_id] = None
                self._more.set()

    def used(self, rollout_id: str) -> Sequence[Used]:
        """Returns the tokens that all attempts of a rollout used, each answer once."""
        return self._used.get(rollout_id) or by_model(self._paid.get(rollout_id, {}).values())

    @property
    def used_by_all(self) -> Sequence[Used]:
        """The tokens of all rollouts, also of those that have not ended."""
        return by_model(one for rollout_id in {*self._used, *self._paid} for one in self.used(rollout_id))

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Saves rollouts as they end, while open, and then what is left of them. `errors` has what failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._save_as_they_end(), name="penstock-save")
                yield
                self._is_complete = True
                self._more.set()
        except BaseExceptionGroup as group:
            raise first_of(group) from None
        # A service may have been away when they ended.
        self._unsaved |= dict.fromkeys(self.errors)
        await self._save_all()

    async def finish(self, seconds: float) -> None:
        """Saves what has ended and is not saved, after an interruption, for at most so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._save_all()

    async def _save_as_they_end(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._save_all()
            if self._is_complete:
                return

    async def _save_all(self) -> None:
        while self._unsaved:
            rollout_id = next(iter(self._unsaved))
            try:
                await self._save(rollout_id)
            except (PenstockError, OSError) as error:
                self.errors[rollout_id] = error
            else:
                self.errors.pop(rollout_id, None)
            del self._unsaved[rollout_id]

    async def _save(self, rollout_id: str) -> None:
        try:
            trajectory = await self._ps.rollouts.trajectory(rollout_id, bodies=True)
        except FailedPrecondition as error:
            if error.reason != "TRAJECTORY_ABSENT":
                raise
        else:
            write_jsonl([trajectory], self._folder / rollout_id / "turns.jsonl", "turns")
            write_jsonl([trajectory], self._folder / rollout_id / "sequences.jsonl", "sequences")
            self.saved.add(rollout_id)
            if self._keep:
                self.trajectories[rollout_id] = trajectory
            # A call may have ended too late for an event.
            self._paid[rollout_id] = paid(trajectory.calls) | self._paid[rollout_id]
        self._used[rollout_id] = by_model(self._paid.pop(rollout_id, {}).values())
