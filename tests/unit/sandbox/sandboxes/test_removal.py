"""However leases end, providers fail and services die: nothing is forgotten before it is gone, and all goes."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.sandbox.scripted_backend import ScriptedHandle, World
from tests.unit.sandbox.scripted_domain import Domain, opened, ready

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError, Unavailable
from penstock_sandbox.domain.model import SNAPSHOT_LABEL, SandboxSpec, State

_LIFETIME_S = 500.0
_MOST = 4


async def begin_removal(domain: Domain, sandbox_id: str, how: str) -> None:
    """Begins to remove a sandbox, by a caller's delete or by the end of its lease; does not wait for the rest."""
    if how == "delete":
        domain.begin_delete(sandbox_id)
        await asyncio.sleep(0)
    else:
        domain.now = domain.sandboxes.table.get(sandbox_id).view.expires_at
        assert domain.sandboxes.leases.reap() == [sandbox_id]


class EndsMachine(RuleBasedStateMachine):
    """Sandboxes over a provider that fails at will, in a service that is killed at will."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-ends-")
        self.world = World()
        self.stack = AsyncExitStack()
        self.domain: Domain
        self.ready_at: dict[str, float] = {}
        self.now = 1000.0

    def do(self, work: object) -> object:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    @initialize()
    def begin(self) -> None:
        self.do(self._open())

    async def _open(self) -> None:
        self.stack = AsyncExitStack()
        self.domain = await self.stack.enter_async_context(
            opened(Path(self.folder.name), self.world, most=_MOST, max_lifetime_s=_LIFETIME_S, now=self.now)
        )

    @property
    def usable(self) -> list[str]:
        return ready([live.view for live in self.domain.sandboxes.table])

    @property
    def shown(self) -> list[str]:
        """By age, not by name: names are random, and an example must mean the same when it is run again."""
        return [live.view.id for live in self.domain.sandboxes.table]

    @rule(fails=st.booleans())
    def create(self, fails: bool) -> None:
        async def work() -> None:
            self.domain.backend.create_fails = fails
            with suppress(OSError, PenstockError):
                view = await self.domain.create(wait_s=0)
                self.ready_at[view.id] = self.domain.now
            await self.domain.settle()

        self.do(work())

    @rule(fails=st.booleans())
    def provider_fails(self, fails: bool) -> None:
        self.world.fails = fails

    @rule()
    def delays_are_over(self) -> None:
        self.do(self.domain.try_again())

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.shown))

        async def work() -> None:
            try:
                await self.domain.sandboxes.delete(chosen)
            except Unavailable as pending:
                assert pending.reason == "DELETE_PENDING" and pending.retry_after_s
                assert chosen in [view.id for view in self.domain.sandboxes.table.matching({})], (
                    "shown until it is gone"
                )
            else:
                assert chosen not in self.world.sandboxes, "gone when the answer comes"

        self.do(work())

    @precondition(lambda self: self.usable)
    @rule(data=st.data(), lease_s=st.floats(1, 1000))
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        chosen = data.draw(st.sampled_from(self.usable))
        before = self.domain.sandboxes.table.get(chosen).view.expires_at

        async def work() -> None:
            try:
                until = await self.domain.sandboxes.leases.renew(chosen, lease_s)
            except OSError:
                assert self.domain.sandboxes.table.get(chosen).view.expires_at == before
                return
            assert until == min(self.domain.now + lease_s, self.ready_at[chosen] + _LIFETIME_S)
            assert self.world.ends[chosen] == until, "the provider knows"

        self.do(work())

    @rule(seconds=st.sampled_from([1.0, 50.0, 101.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        async def work() -> None:
            self.now = self.domain.now = self.domain.now + seconds
            expired = self.domain.sandboxes.leases.reap()
            await self.domain.settle()
            for sandbox_id in expired:
                assert sandbox_id not in self.usable

        self.do(work())

    @precondition(lambda self: self.usable)
    @rule(data=st.data())
    def provider_loses_one(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.usable))

        async def work() -> None:
            self.domain.lose(chosen)
            await self.domain.settle()
            assert self.domain.sandboxes.table.get(chosen).view.state is State.LOST

        self.do(work())

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), pausing=st.booleans())
    def pause_or_resume(self, data: st.DataObject, pausing: bool) -> None:
        chosen = data.draw(st.sampled_from(self.shown))

        async def work() -> None:
            change = self.domain.sandboxes.pause if pausing else self.domain.sandboxes.resume
            before = self.domain.sandboxes.table.get(chosen).view.state
            try:
                await change(chosen)
            except (OSError, FailedPrecondition):
                assert self.domain.sandboxes.table.get(chosen).view.state is before
            else:
                after = self.domain.sandboxes.table.get(chosen).view.state
                assert after is (State.PAUSED if pausing else State.READY)
                assert (chosen in self.world.paused) == pausing

        self.do(work())

    @rule()
    def service_is_killed_and_starts_again(self) -> None:
        async def work() -> None:
            await self.stack.aclose()
            await self._open()

        self.do(work())
        assert not self.usable

    @invariant()
    def what_is_there_is_journalled_shown_and_counted(self) -> None:
        if not hasattr(self, "domain"):
            return
        rows = self.do(self.domain.rows())
        assert isinstance(rows, set)
        assert self.world.sandboxes <= rows, "nothing is there that a next start would not know of"
        shown = {view.id for view in self.domain.sandboxes.table.matching({})}
        assert self.world.sandboxes <= shown
        assert {view.id for view in self.domain.sandboxes.table.matching({}) if not view.state.terminal} <= (
            self.world.sandboxes
        )
        # Places are held exactly by what this instance made and is still there.
        mine = self.world.sandboxes & self.domain.backend.made
        assert self.domain.sandboxes._admission._slots._total == len(mine) <= _MOST

    def teardown(self) -> None:
        async def work() -> None:
            # In the end everything goes, whatever happened before.
            self.world.fails = False
            await self.domain.try_again()
            self.domain.now += 10_000
            self.domain.sandboxes.leases.reap()
            await self.domain.settle()
            assert not self.world.sandboxes and not await self.domain.rows()
            assert not self.domain.sandboxes.table.matching({})
            await self.stack.aclose()

        if hasattr(self, "domain"):
            self.do(work())
        self.loop.close()
        self.folder.cleanup()


@pytest.mark.requirement("R49", "R50", "R70")
def test_teardown_forgets_and_leaves_nothing_in_any_order_of_failures() -> None:
    run_state_machine_as_test(EndsMachine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


@pytest.mark.requirement("R50", "R61")
async def test_lease_ends_at_the_sandboxs_lifetime_at_most(tmp_path: Path) -> None:
    async with opened(tmp_path, max_lifetime_s=150.0) as domain:
        made = await domain.create()
        assert made.expires_at == 1100.0
        domain.now = 1090.0
        assert (
            await domain.sandboxes.leases.renew(made.id, 100.0)
            == 1150.0
            == domain.sandboxes.table.get(made.id).view.expires_at
        )
        for wrong in (0.0, 1001.0):
            with pytest.raises(InvalidArgument):
                await domain.sandboxes.leases.renew(made.id, wrong)


@pytest.mark.requirement("R50")
async def test_renewal_unknown_to_the_provider_leaves_the_lease_unchanged(tmp_path: Path) -> None:
    """A lease that the provider does not know would end the sandbox all the same."""
    async with opened(tmp_path) as domain:
        made = await domain.create()
        domain.world.fails = True
        with pytest.raises(OSError, match="the provider fails"):
            await domain.sandboxes.leases.renew(made.id, 500.0)
        assert domain.sandboxes.table.get(made.id).view.expires_at == made.expires_at
        domain.world.fails = False
        assert await domain.sandboxes.leases.renew(made.id, 500.0) == 1500.0 == domain.world.ends[made.id]


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("how", ["delete", "lease end"])
async def test_sandbox_being_removed_gets_no_renewal_and_no_work(tmp_path: Path, how: str) -> None:
    """Its caller would believe that it has the sandbox."""
    async with opened(tmp_path) as domain:
        made = await domain.create()
        await begin_removal(domain, made.id, how)
        assert domain.sandboxes.table.get(made.id).view.state is State.READY, "its removal is under way"
        with pytest.raises(NotFound) as refused:
            await domain.sandboxes.leases.renew(made.id, 500.0)
        assert refused.value.reason == "SANDBOX_UNKNOWN" and made.id not in domain.world.ends
        with pytest.raises(NotFound):
            domain.sandboxes.table.usable(made.id)
        with pytest.raises(NotFound):
            await domain.sandboxes.pause(made.id)
        await domain.settle()
        assert not domain.sandboxes.table.matching({})


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("how", ["delete", "lease end"])
async def test_removal_during_a_renewal_refuses_the_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It begins while the provider is asked."""
    async with opened(tmp_path) as domain:
        made = await domain.create()
        handle = domain.sandboxes.table.get(made.id).handle
        assert isinstance(handle, ScriptedHandle)

        async def renewed(until: float) -> None:
            await begin_removal(domain, made.id, how)

        monkeypatch.setattr(handle, "renewed", renewed)
        with pytest.raises(NotFound) as refused:
            await domain.sandboxes.leases.renew(made.id, 500.0)
        assert refused.value.reason == "SANDBOX_UNKNOWN"


@pytest.mark.requirement("R25", "R50")
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("how", ["delete", "lease end"])
async def test_repeated_create_never_returns_a_removed_sandbox(tmp_path: Path, how: str, settled: bool) -> None:
    """It makes another one, as if the request were new; also while the removal is under way."""
    async with opened(tmp_path) as domain:
        made = await domain.create(request="r")
        assert (await domain.create(request="r")).id == made.id
        await begin_removal(domain, made.id, how)
        if settled:
            await domain.settle()
        again = await domain.create(request="r")
        assert again.id != made.id and again.state is State.READY
        await domain.settle()
        assert domain.world.sandboxes == {again.id}
        assert (await domain.create(request="r")).id == again.id


@pytest.mark.requirement("R39", "R50")
async def test_undeletable_sandbox_is_lost_refuses_work_and_goes_later(tmp_path: Path) -> None:
    """With a delay after which to ask again."""
    async with opened(tmp_path, most=1) as domain:
        made = await domain.create("a")
        domain.world.fails = True
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                await domain.sandboxes.delete(made.id)
            assert caught.value.reason == "DELETE_PENDING" and caught.value.retry_after_s
        (shown,) = domain.sandboxes.table.matching({"owner": "a"})
        assert (shown.state, shown.lost_reason) == (State.LOST, "DELETE_PENDING")
        with pytest.raises(FailedPrecondition) as refused:
            domain.sandboxes.table.usable(made.id)
        assert refused.value.reason == "SANDBOX_LOST"
        # Its place is taken as long as it may be there.
        with pytest.raises(PenstockError):
            await domain.create(wait_s=0)
        domain.world.fails = False
        await domain.try_again()
        assert not domain.sandboxes.table.matching({}) and not await domain.rows()
        await domain.sandboxes.delete(made.id)
        await domain.create(wait_s=0)


@pytest.mark.requirement("R50")
async def test_leftover_snapshot_sandboxes_are_removed_and_never_listed(tmp_path: Path) -> None:
    """No caller was told of it, so none asks what became of it."""
    world = World()
    async with opened(tmp_path, world) as domain:
        left = await domain.sandboxes.create("", SandboxSpec(labels={SNAPSHOT_LABEL: "key"}), shared=True)
        world.sandboxes.add("only-labelled")
    world.fails = True
    async with opened(tmp_path, world) as domain:
        assert not domain.sandboxes.table.matching({})
        assert await domain.rows() == {left.id}
        world.fails = False
        await domain.try_again()
        assert not world.sandboxes and not await domain.rows()


@pytest.mark.requirement("R50")
async def test_leftover_sandboxes_keep_their_labels_and_are_removed(tmp_path: Path) -> None:
    """Also when the provider cannot be asked at first."""
    world = World()
    async with opened(tmp_path, world) as domain:
        left = await domain.create("a")
        world.sandboxes.add("only-labelled")
    assert world.sandboxes == {left.id, "only-labelled"}
    world.fails = True
    async with opened(tmp_path, world) as domain:
        (shown,) = domain.sandboxes.table.matching({"owner": "a"})
        assert (shown.id, shown.state, shown.lost_reason) == (left.id, State.LOST, "SERVICE_RESTARTED")
        assert await domain.rows() == {left.id}
        with pytest.raises(Unavailable):
            await domain.sandboxes.delete(left.id)
        # New ones are made meanwhile, and are not what is removed.
        fresh = await domain.create()
        world.fails = False
        await domain.try_again()
        assert world.sandboxes == {fresh.id} == await domain.rows()
        assert [view.id for view in domain.sandboxes.table.matching({})] == [fresh.id]
