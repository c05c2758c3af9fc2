"""RolloutService.WatchRollouts: summary rows of many rollouts, and their changes.

Invariant: a watcher holds only the ids of running rollouts, however many have ended since it connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Final

from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock_chassis import times
from penstock_chassis.errors import Violation
from penstock_chassis.validation import invalid
from penstock_driver.domain.records import Filter
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.summaries import RolloutRow, Summaries
from penstock_driver.wire.to_proto import PHASES

PAGE: Final = 256
"""Rows of one message."""
DEFAULT_ENDED: Final = 1000
MOST_ENDED: Final = 10_000
DEFAULT_INTERVAL_S: Final = 0.25
_INTERVAL_S: Final = (0.1, 60.0)


async def watch_rows(
    rows: Summaries,
    event_log: EventLog,
    matching: Filter,
    request: rollout_service_pb2.WatchRolloutsRequest,
    *,
    heartbeat_s: float,
) -> AsyncIterator[rollout_service_pb2.WatchRolloutsResponse]:
    """Yield the existing rows, then changes, at most one message per `interval`, without end."""
    ended_limit, interval_s = _terms(request)
    loop = asyncio.get_running_loop()
    # Sent and still running: only its end can make a rollout stop matching.
    running: set[str] = set()
    with event_log.changes(matching.namespace) as changes:
        async for page in _snapshot(rows, matching, ended_limit):
            running.update(_running(page))
            yield rollout_service_pb2.WatchRolloutsResponse(rollouts=map(row_to_proto, page))
        yield rollout_service_pb2.WatchRolloutsResponse(snapshot_complete=True)
        while True:
            if not await changes.wait(heartbeat_s):
                yield rollout_service_pb2.WatchRolloutsResponse()
                continue
            began = loop.time()
            while ids := changes.take(PAGE):
                found = [row for row in await rows.of(ids) if row.matches(matching)]
                # The stream keeps no ids of ended rollouts, so a deleted one is reported whether or not it was sent.
                # One whose row is merely missing may be of another namespace.
                gone = {rollout_id for rollout_id, is_deleted in ids.items() if is_deleted or rollout_id in running}
                gone.difference_update(row.rollout_id for row in found)
                running.difference_update(ids)
                running.update(_running(found))
                if found or gone:
                    yield rollout_service_pb2.WatchRolloutsResponse(
                        rollouts=map(row_to_proto, found), gone_rollout_ids=sorted(gone)
                    )
            await asyncio.sleep(began + interval_s - loop.time())


def _running(page: Sequence[RolloutRow]) -> Iterator[str]:
    return (row.rollout_id for row in page if row.end_time is None)


async def _snapshot(rows: Summaries, matching: Filter, ended_limit: int) -> AsyncIterator[Sequence[RolloutRow]]:
    """Pages of all running rollouts and the newest ended ones."""
    for ended, most in ((False, None), (True, ended_limit)):
        if matching.ended not in (None, ended):
            continue
        before, left = 0, most
        wanted = replace(matching, ended=ended)
        while left is None or left > 0:
            page = await rows.newest(wanted, before, PAGE if left is None else min(PAGE, left))
            if not page:
                break
            yield page
            before = page[-1].number
            left = None if left is None else left - len(page)


def _terms(request: rollout_service_pb2.WatchRolloutsRequest) -> tuple[int, float]:
    """The number of ended rollouts, and seconds between messages; InvalidArgument names the field."""
    ended_limit = request.ended_limit if request.HasField("ended_limit") else DEFAULT_ENDED
    interval_s = times.seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
    violations = []
    if not 0 <= ended_limit <= MOST_ENDED:
        violations.append(Violation("ended_limit", f"expected 0 to {MOST_ENDED}"))
    if not _INTERVAL_S[0] <= interval_s <= _INTERVAL_S[1]:
        violations.append(Violation("interval", "expected 100 ms to 1 min"))
    if violations:
        raise invalid(violations)
    return ended_limit, interval_s


def row_to_proto(row: RolloutRow) -> rollout_pb2.RolloutSummary:
    wire = rollout_pb2.RolloutSummary(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        index=row.index,
        run_id=row.run_id,
        task_id=row.task_id,
        agent=row.agent,
        labels=row.labels,
        phase=PHASES[row.phase],
        create_time=times.timestamp(row.create_time),
        attempts=row.attempts,
        namespace=row.namespace,
        home=row.home,
        paused=row.paused,
        calls=rollout_pb2.CallSums(
            calls=row.calls,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            oldest_policy_version=row.oldest_version,
            newest_policy_version=row.newest_version,
            logprob_sum=row.logprob_sum,
            logprob_count=row.logprob_count,
        ),
    )
    if row.end_time is not None:
        wire.end_time.CopyFrom(times.timestamp(row.end_time))
    if row.outcome is not None:
        if row.outcome.HasField("failure"):
            wire.failure.CopyFrom(row.outcome.failure)
        if row.outcome.HasField("reward"):
            wire.reward.CopyFrom(row.outcome.reward)
            wire.reward.ClearField("turns")  # a row is small, and sent at each change
    return wire
