"""A trainer's session over all gates: each gate's calls come in, and each result goes to the gate of its call.

`stream.py` has the part at one gate. What a session has set (policy version, tools, a pause, credits) goes to all
gates; one that comes later or comes back gets it before its calls are handed out. The credits are shared out: a gate
whose window is full gets more while others do not use theirs.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, SupportsFloat, TypeVar

from penstock.client.errors import (
    CallEnded,
    ConfigurationError,
    Internal,
    InvalidArgument,
    PenstockError,
    SessionLost,
)
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.host_tools import HostTool, Serving
from penstock.client.intercept.leases import Inbox
from penstock.client.intercept.metric_log import MetricLog
from penstock.client.intercept.pauses import PAUSE_S
from penstock.client.intercept.stream import GateStream, SessionOptions
from penstock.client.transport import tracing
from penstock.client.transport.cluster import FRESH_S, NOT_ASKED, Cluster, Member
from penstock.client.wire.chat import duration
from penstock.interception.v1 import intercept_service_pb2 as pb

__all__ = ["InterceptSession", "Selector", "SessionOptions", "selector_to"]

T = TypeVar("T")
_log = logging.getLogger("penstock.intercept")

GONE_S: Final = 30.0
"""How long calls wait for a gate of which the driver, too, says that it is lost: one that restarts keeps its calls."""
LOOK_AGAIN_S: Final = 1.0
"""How often the driver is asked for the gates while one is away. Else as often as its answer is not fresh any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """The rollouts whose calls a session wants: those that match every condition that is set; none set = all.

    They are of the connection's namespace; `all_namespaces`, for an operator, selects those of all.
    """

    run_id: str | None = None
    group_id: str | None = None
    rollout_ids: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    all_namespaces: bool = False
    policy_ids: Sequence[str] = ()
    """Of such rollouts, calls for these policies only; none = for any."""


@dataclass(slots=True, eq=False)
class _Gate:
    """A gate and the session's part there."""

    member: Member
    stream: GateStream
    unreachable: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers neither this session nor the driver: nobody waits for it."""
    away_since: float | None = None
    """Since when its stream is broken, on the loop's clock."""


class InterceptSession:
    """An `async with` block that receives agents' calls; made by `ps.intercept`.

    Inside, `calls()` yields them, from every gate that the driver lists. On entry it waits for unreachable gates, and a
    broken connection is reopened, for `reconnect_timeout` seconds. After that, and on a permanent error, `calls()` and
    every answer in flight raise; but while another gate can be reached, the session goes on without the lost one. Its
    calls have ended then (`GATE_LOST`), and it takes part again when it is back.
    """

    def __init__(
        self,
        cluster: Cluster,
        given: Member,
        selector: Selector,
        options: SessionOptions,
        metrics: MetricLog | None = None,
    ) -> None:
        """`given` is the gate while no driver can be asked for all; `metrics` logs those of the selected run."""
        if options.credits < 1:
            raise InvalidArgument("A session needs at least one credit", reason="CREDITS")
        self._cluster = cluster
        self._given = given
        self._selector = selector_to(selector)
        self._options = options
        self._metrics = metrics
        self._credits = pb.Credits(calls=options.credits, bytes=options.credit_bytes)
        self._gates: dict[str, _Gate] = {}
        self._inbox = Inbox()
        self._offers = Serving(asyncio.Event())
        self._pause: tuple[pb.PauseCalls, float] | None = None
        self._changes = 0
        self._changed = asyncio.Event()
        self._sharers: list[GateStream] = []
        self._is_closing = False
        self._failure: PenstockError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        """The session's id at its first gate; changes when that could not resume the old one."""
        return next((gate.stream.session_id for gate in self._gates.values() if gate.stream.session_id), "")

    async def __aenter__(self) -> Self:
        await self._look()
        self._task = asyncio.create_task(self._follow(), name="penstock-intercept-gates")
        try:
            while not self._is_ready():
                await self._change(self._changes)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)

    async def close(self) -> None:
        """Sends the remaining results and metrics and ends the session: calls without an answer are queued again at
        once.

        Raises:
            PenstockError: metrics could not be logged.
        """
        await self._close(None)

    async def _close(self, error: BaseException | None) -> None:
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(gate.stream.close() for gate in self._gates.values()))
        self._fail(SessionLost("The session is closed", reason="SESSION_CLOSED"))
        if self._metrics is not None:
            await self._metrics.close_after(error)

    async def log(self, metrics: Mapping[str, SupportsFloat], *, step: int, time: datetime | None = None) -> None:
        """Logs metrics of the session's run, such as the loss, for the dashboard; it needs a session of one `run_id`.

        Returns at once: they are sent in the background, in order, and the end of the session waits for them. With
        16,384 values that are not sent yet it waits.

        Args:
            metrics: finite numbers by name: 1 to 128 names of 1 to 128 letters, digits and `_ . / -`.
            step: 0 to 2^53 - 1, in any order. The last value that is logged of a step counts.
            time: when it was measured, with a time zone; None = now.

        Raises:
            InvalidArgument: `FIELD_INVALID`; violations name the fields, and nothing of the step is logged.
            ConfigurationError: `RUN_NOT_SELECTED`: the session is not of one run, or the connection has no driver.
            PenstockError: earlier metrics could not be logged.
        """
        if self._metrics is None:
            raise ConfigurationError(
                "Metrics are those of a run: open the session with run_id, at a connection that has a driver",
                reason="RUN_NOT_SELECTED",
            )
        await self._metrics.log(metrics, step=step, time=time)

    async def calls(self) -> AsyncGenerator[ModelCall, None]:
        """Yields calls to answer, oldest first; ends when the session is closed or finished. Several loops may share
        it.

        Raises:
            PenstockError: the session failed permanently.
        """
        try:
            while (call := await self._inbox.next_call()) is not None:
                call.taken()
                yield call
        finally:
            tracing.taken(None)
        if self._failure is not None and not self._is_closing:
            raise self._failure

    def finish(self) -> None:
        """Ends `calls()` once all calls that have arrived are handed out: no more are expected."""
        self._inbox.finish()

    def announce(self, policy_version: int, policy_id: str = "") -> None:
        """Announces the newest version of a policy to all gates, for their staleness bounds.

        Empty `policy_id` = the only trained policy of each rollout.
        """
        if policy_id:
            policies = {**self._options.policies, policy_id: policy_version}
            self._options = replace(self._options, policies=policies)
        else:
            self._options = replace(self._options, policy_version=policy_version)
        for gate in self._gates.values():
            gate.stream.announce(policy_version, policy_id)

    def set_credits(self, calls: int, credit_bytes: int | None = None) -> None:
        """Replaces the window: maximum calls (0 = none for now) and bytes (None = unchanged) leased at once."""
        if calls < 0:
            raise InvalidArgument("Credits must not be negative", reason="CREDITS")
        if credit_bytes is None and self._credits.HasField("bytes"):
            credit_bytes = self._credits.bytes
        self._credits = pb.Credits(calls=calls, bytes=credit_bytes)
        self._share_out()

    async def offer_tools(self, tools: Sequence[HostTool], *, selector: Selector | None = None) -> None:
        """Offers tools of this program to the agents of rollouts created from now on; their calls run here.

        Returns when every gate that can be reached has them.

        Args:
            tools: replace this session's earlier offer to the same selector; none = withdraws it. Open rollouts
                keep what they were offered.
            selector: which rollouts' agents, in any mode; None = those whose calls the session wants.

        Raises:
            InvalidArgument: `TOOL_NAME_RESERVED`, `TOOL_NOT_ALLOWED`, `FIELD_INVALID`, `HOST_TOOL`; violations name
                the fields.
            Unavailable: a gate did not answer; repeat it.
        """
        self._raise_if_over()
        whose = of_rollouts(self._selector) if selector is None else selector_to(selector)
        self._offers.check(tools, whose)
        before = self._offers.offers(whose)
        self._offers.offered(tools, whose)  # first: a gate that comes meanwhile has to get them
        try:
            await self._everywhere(
                lambda stream: stream.offer_tools(tools, whose), lambda stream: stream.adopt_tools(tools, whose)
            )
        except BaseException:
            self._offers.offered(before, whose)
            raise

    async def pause(self, reason: str = "", *, max_duration: float | None = None) -> int:
        """Pauses the calls of this selector at all gates, for every session and for the model source; agents see
        keep-alives. Returns when every gate that can be reached holds them.

        Args:
            reason: for the logs, for example "weight sync".
            max_duration: seconds after which calls flow again by themselves; None = 10 min.

        Returns:
            The number of calls leased or dispatched now; answers to them are still accepted.
        """
        self._raise_if_over()
        until = asyncio.get_running_loop().time() + (PAUSE_S if max_duration is None else max_duration)
        self._pause = pb.PauseCalls(reason=reason, max_duration=duration(max_duration)), until
        return sum(
            await self._everywhere(
                lambda stream: stream.pauses.pause(reason, max_duration),
                lambda stream: stream.pauses.began_without_it(),
            )
        )

    async def resume(self) -> None:
        """Lets calls flow again, at all gates."""
        self._raise_if_over()
        self._pause = None
        await self._everywhere(lambda stream: stream.pauses.resume())

    # The gates.

    async def _everywhere(
        self, act: Callable[[GateStream], Awaitable[T]], later: Callable[[GateStream], object] = lambda _: None
    ) -> list[T]:
        """Does something at every gate; returns the results of those that can be reached. The others get `later`."""

        async def at(gate: _Gate, stream: GateStream, acting: asyncio.Future[T]) -> list[T]:
            both: list[asyncio.Future[Any]] = [acting, asyncio.ensure_future(gate.unreachable.wait())]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if acting.done():
                    return [acting.result()]
            except PenstockError:
                if not stream.is_away or self._failure is not None:
                    raise
            finally:
                for task in both:
                    task.cancel()
                await asyncio.wait(both)
            later(stream)
            return []

        # Begun at once at every gate, so that what is requested later is later everywhere.
        begun = [(gate, gate.stream, asyncio.ensure_future(act(gate.stream))) for gate in self._gates.values()]
        found = await asyncio.gather(*(at(*item) for item in begun))
        self._raise_if_over()
        return [item for items in found for item in items]

    async def _follow(self) -> None:
        """Keeps the session at all gates, as the driver lists them, until it is closed or has failed."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + LOOK_AGAIN_S
        try:
            while self._failure is None:
                seen = self._changes
                self._notice()
                for gate in list(self._gates.values()):
                    if gate.stream.failure is not None:
                        await self._ended(gate)
                if self._sharing() != self._sharers:
                    self._share_out()
                if loop.time() >= look_at:
                    await self._look()
                    look_at = loop.time() + LOOK_AGAIN_S
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(look_at):
                        await self._change(seen)
        except PenstockError as error:  # such as MEMBER_NOT_TRUSTED: without that gate the session would not be whole
            self._fail(error)
        except Exception as error:
            self._fail(Internal(f"The session failed: {error!r}", reason="SESSION_FAILED"))
            raise

    async def _look(self) -> None:
        """Asks which gates there are; the session goes to new ones, and leaves lost ones."""
        is_away = any(not gate.stream.is_connected for gate in self._gates.values())
        try:
            members = await self._cluster.members(
                "interception", patient=False, age_s=LOOK_AGAIN_S if is_away else FRESH_S
            )
        except NOT_ASKED as error:
            if self._gates:
                return
            _log.warning("the gates are not known yet, only the given one is used: %s", error)
            members = [self._given]
        present = {member.service.address: member for member in members}
        for address, member in present.items():
            if address not in self._gates:
                self._add(member)
            self._gates[address].member = member
        for address, gate in list(self._gates.items()):
            is_lost = address not in present or gate.member.is_lost
            if gate.stream.is_connected or not is_lost:
                continue
            gate.unreachable.set()
            now = asyncio.get_running_loop().time()
            waited = now - (now if gate.away_since is None else gate.away_since)
            if address not in present or (waited >= GONE_S and gate.stream.session_id):
                await self._leave(gate, stays=address in present)
        self._notify()

    def _add(self, member: Member, *, is_late: bool = False) -> None:
        """Opens the session at one more gate, with the state that it has."""
        alone = not self._gates
        options = replace(self._options, credits=max(1, self._credits.calls))
        if is_late or (member.is_lost and not alone):
            options = replace(options, reconnect_timeout=math.inf)
        stream = GateStream(
            member.service, self._selector, options, self._inbox, self._notify, self._share_out_if_short
        )
        stream.credits = pb.Credits()
        stream.credits.CopyFrom(self._credits)
        for selector, tools in self._offers.everything():
            stream.adopt_tools(tools, selector)
        if self._pause is not None:
            pause, until = self._pause
            if (left := until - asyncio.get_running_loop().time()) > 0:
                stream.pauses.adopt(pause.reason, max(left, 1.0))
        gate = _Gate(member, stream)
        if member.is_lost:
            gate.unreachable.set()
        self._gates[member.service.address] = gate
        self._share_out()
        stream.start()

    async def _leave(self, gate: _Gate, *, stays: bool) -> None:
        """Ends what a lost gate had. If it stays a member, the session waits for it without a limit."""
        name = gate.member.name or gate.member.service.address
        _log.warning("gate %s is lost: its calls have ended", name)
        await gate.stream.lose(CallEnded(f"Gate {name} is lost, and the call with it", reason="GATE_LOST"))
        del self._gates[gate.member.service.address]
        if stays:
            self._add(gate.member, is_late=True)
            self._gates[gate.member.service.address].unreachable.set()
        self._share_out()

    async def _ended(self, gate: _Gate) -> None:
        """A gate's stream ended for good: without another gate that can be reached the session has failed."""
        others = any(other.stream.is_connected for other in self._gates.values() if other is not gate)
        error = gate.stream.failure
        if error is not None and (not gate.stream.is_away or not others):
            self._fail(error)
        else:
            await self._leave(gate, stays=True)

    def _notice(self) -> None:
        """Notes which gates can be reached."""
        now = asyncio.get_running_loop().time()
        connected = False
        for gate in self._gates.values():
            if gate.stream.is_connected:
                connected = True
                gate.away_since = None
                gate.unreachable.clear()
                gate.stream.reconnect_timeout = self._options.reconnect_timeout
            elif gate.away_since is None:
                gate.away_since = now
        if not connected and self._gates:
            since = max(gate.away_since or now for gate in self._gates.values())
            endless = all(gate.stream.reconnect_timeout == math.inf for gate in self._gates.values())
            if endless and now - since > self._options.reconnect_timeout:
                self._fail(SessionLost("No gate came back in time", reason="SESSION_LOST"))

    def _is_ready(self) -> bool:
        self._raise_if_over()
        gates = self._gates.values()
        waiting = any(not gate.stream.is_connected and not gate.unreachable.is_set() for gate in gates)
        return not waiting and any(gate.stream.is_connected for gate in gates)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.set()

    async def _change(self, seen: int) -> None:
        """Waits until something has changed at a gate since there were `seen` changes."""
        while self._changes == seen:
            self._changed.clear()
            await self._changed.wait()

    # Credits.

    def _share_out_if_short(self) -> None:
        """Shares the window out anew if a gate has used its part up while others have more than they use."""
        streams = self._sharers
        if len(streams) < 2 or not self._credits.calls:
            return
        is_short = any(stream.held >= stream.credits.calls for stream in streams)
        if is_short and any(stream.credits.calls - stream.held >= 2 for stream in streams):
            self._share_out()

    def _share_out(self) -> None:
        """Gives each gate what it holds and an equal part of the rest, at least one call."""
        streams = self._sharers = self._sharing()
        total = self._credits.calls
        free = max(0, total - sum(stream.held for stream in streams))
        for at, stream in enumerate(streams):
            part = free // len(streams) + (at < free % len(streams))
            calls = total if len(streams) == 1 else max(1, stream.held + part) if total else 0
            window = pb.Credits(calls=calls)
            if self._credits.HasField("bytes"):
                window.bytes = max(1, self._credits.bytes * calls // total) if total else self._credits.bytes
            stream.set_credits(window)

    def _sharing(self) -> list[GateStream]:
        gates = self._gates.values()
        return [gate.stream for gate in gates if gate.stream.is_connected or not gate.unreachable.is_set()]

    # The end.

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: PenstockError) -> None:
        """Ends the session: all waiters get `error`."""
        if self._failure is None:
            self._failure = error
            for gate in self._gates.values():
                gate.stream.fail(error)
            self._inbox.finish()
        self._notify()


def selector_to(selector: Selector) -> pb.CallSelector:
    """Converts a selector."""
    return pb.CallSelector(
        run_id=selector.run_id,
        group_id=selector.group_id,
        rollout_ids=selector.rollout_ids,
        labels=selector.labels,
        all_namespaces=selector.all_namespaces,
        policy_ids=selector.policy_ids,
    )


def of_rollouts(selector: pb.CallSelector) -> pb.CallSelector:
    """Returns the selector of the rollouts, whichever policy their calls are for."""
    whole = pb.CallSelector()
    whole.CopyFrom(selector)
    whole.ClearField("policy_ids")
    return whole
