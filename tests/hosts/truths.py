"""What must be true after a run, whatever hosts were lost. Each function returns what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

from tests.hosts import left
from tests.hosts.records import HOME_LOST, LOST, Lost, Seen, Story

_ON_ITS_WAY_S: Final = 1.0
"""An answer may have left a host before the loss."""


def ends_once(seen: Seen) -> Iterator[str]:
    """Each rollout ends exactly once, for its client as for its driver; only one of a lost disk is created again."""
    for number, why in sorted(seen.refused.items()):
        yield f"rollout {number} was refused: {why}"
    by_number: dict[int, list[Story]] = {}
    for story in seen.stories:
        by_number.setdefault(story.number, []).append(story)
        if len(story.ends) != 1:
            yield f"{story.rollout_id} ended {len(story.ends)} times"
        if story.driver in seen.unlisted_drivers or story.ended < seen.wiped.get(story.driver, 0.0):
            continue
        if story.reason == HOME_LOST and story.driver in seen.wiped:
            continue
        if story.rollout_id not in seen.listed:
            yield f"{story.rollout_id} is not listed by {story.driver}"
        elif story.ends and seen.listed[story.rollout_id] != story.ends[-1]:
            yield f"{story.rollout_id} ended as {story.ends[-1]}, its driver lists {seen.listed[story.rollout_id]}"
    for rollout_id in sorted(seen.listed.keys() - {story.rollout_id for story in seen.stories}):
        yield f"{rollout_id} is listed, and its client does not know it"
    for number, stories in by_number.items():
        early = [story.rollout_id for story in stories[:-1] if story.reason != HOME_LOST]
        if early:
            yield f"rollout {number} was created again although {early} ended"


def earned(seen: Seen) -> Iterator[str]:
    """Each reward is 1, because the policy earns it every time, and none was given where a place was lost."""
    for story in seen.stories:
        if story.reward not in (None, 1.0):
            yield f"{story.rollout_id} has reward {story.reward:g}, earned is 1"
    yield from unearned(seen)


def unearned(seen: Seen) -> Iterator[str]:
    """Rewards of attempts under which a place was lost."""
    for story in seen.stories:
        if story.reward is None:
            continue
        last = story.attempts[-1]
        for loss in seen.losses:
            until = {last.node: last.graded, last.gate: last.agent_ended}.get(loss.name)
            if until is not None and _was_away(loss, last.began, until):
                yield f"{story.rollout_id} has a reward, and {loss.name} was lost under its last attempt"


def repeated_elsewhere(seen: Seen) -> Iterator[str]:
    """After each lost attempt comes one at another node or gate, where one is left that was not tried.

    One whose service, or a process of it, was killed since may have refused the attempt: then any may have it. So may
    any if the driver itself was away meanwhile, though it is back: it had lost all others.
    """
    for story in seen.stories:
        for number, attempt in enumerate(story.attempts, 1):
            if attempt.reason not in LOST:
                continue
            if number == len(story.attempts):
                if number < seen.max_attempts and story.reason != HOME_LOST:
                    yield f"{story.rollout_id}: attempt {number} was lost and none followed"
                continue
            after, tried = story.attempts[number], story.attempts[:number]
            used = {place for one in tried for place in (one.node, one.gate)}
            away = {loss.name for loss in seen.losses if loss.at <= after.began and (loss.back or inf) > after.began}
            until = after.agent_ended or after.failed or inf
            killed = {one.name for one in seen.disturbances if attempt.began <= one.at <= until}
            cut_off = (
                loss.name == story.driver and loss.at <= after.began and (loss.back or inf) >= attempt.began
                for loss in (*seen.losses, *seen.disturbances)
            )
            if story.driver in killed or any(cut_off):
                continue
            others = {name for name in seen.places if name[:1] == attempt.place[:1]} - used - away - killed
            if others and attempt.place in (after.node, after.gate):
                yield f"{story.rollout_id}: attempt {number + 1} is at {attempt.place} again, which was lost"


def logged_tokens(seen: Seen) -> Iterator[str]:
    """Trajectories have the token ids that an engine sampled, and no call is in two of them."""
    owners: dict[str, str] = {}
    for story in seen.stories:
        for call_id, ids in (story.calls or {}).items():
            if ids not in seen.answers.get(call_id, []):
                yield f"{story.rollout_id}: call {call_id} has other token ids than an engine logged"
            if owners.setdefault(call_id, story.rollout_id) != story.rollout_id:
                yield f"call {call_id} is in {owners[call_id]} and in {story.rollout_id}"


def proven(seen: Seen) -> Iterator[str]:
    """What was exported of each rollout is what its gate recorded."""
    for story in seen.stories:
        yield from (f"{story.rollout_id}: {problem}" for problem in story.problems)


def sampled_once(seen: Seen) -> Iterator[str]:
    """Nothing is sampled again that an agent had received, unless the recording was lost with its gate.

    An agent waits for one call at a time, so each loss takes at most one answer that it has not received.
    """
    for story in seen.stories:
        again, allowed = sampled_again(seen, story), _excused(seen, story)
        if again > allowed:
            reasons = [one.reason for one in story.attempts if one.reason]
            yield f"{story.rollout_id}: {again} answers were sampled again, at most {allowed} were lost: {reasons}"


def sampled_again(seen: Seen, story: Story) -> int:
    """Answers that were sampled for a rollout beyond those of its trajectory; 0 = it was not read."""
    return 0 if story.calls is None else len(seen.sampled.get(story.rollout_id, [])) - len(story.calls)


def _excused(seen: Seen, story: Story) -> int:
    during = [one for one in seen.disturbances if one.at <= story.ended and (one.back or inf) >= story.created]
    gates = {one.name for one in during if one.name.startswith("g")}
    lost = [one for one in story.attempts if one.reason]
    # The recording of an attempt is read from its gate when the attempt is over, which may be lost by then.
    whole = sum(one.reason == "GATE_LOST" or one.gate in gates for one in lost)
    return len(lost) + len(during) + whole * len(story.calls or ())


def answered_once(seen: Seen) -> Iterator[str]:
    """No call is answered twice, where neither its gate nor its engine was lost on the way of the first answer."""
    for call_id, answers in seen.undisturbed.items():
        if len(answers) > 1:
            yield f"call {call_id} was answered {len(answers)} times"


def noticed(seen: Seen) -> Iterator[str]:
    """Attempts at a lost place fail soon: 99 % of them within `Seen.noticed_s`."""
    times = noticed_s(seen)
    if times and percentile(times, 99) > seen.noticed_s:
        yield f"attempts failed up to {percentile(times, 99):.1f} s (p99) after the loss, at most {seen.noticed_s:g} s"


def waited(seen: Seen) -> Iterator[str]:
    """No rollout waits for a lost host for longer than `Seen.waited_s`, for its driver's `Seen.home_s`."""
    for seconds, rollout_id, name in waits(seen):
        most = seen.home_s if name.startswith("d") else seen.waited_s
        if seconds > most:
            yield f"{rollout_id} waited {seconds:.1f} s for {name}, which was lost: at most {most:g} s"


def nothing_left(seen: Seen) -> Iterator[str]:
    """Living hosts have nothing of ended rollouts, and had something of running ones: else the check sees nothing."""
    if seen.during is not None and not seen.during.keys() >= left.RUNNING:
        yield f"living hosts had too little while rollouts ran: {dict(seen.during)}"
    yield from (f"left: {item}" for item in seen.left)


def keys_refused(seen: Seen) -> Iterator[str]:
    """Agent keys of attempts that were lost are void."""
    yield from (f"the key of a lost attempt is accepted: {key}" for key in seen.accepted_keys)


ALL: Final[Sequence[Callable[[Seen], Iterator[str]]]] = (
    ends_once,
    earned,
    repeated_elsewhere,
    logged_tokens,
    proven,
    sampled_once,
    answered_once,
    noticed,
    waited,
    nothing_left,
    keys_refused,
)


def faults(seen: Seen, least: float) -> list[str]:
    """Everything that is not as it must be. `least` is the share of the rollouts that must have their reward."""
    found = [fault for truth in ALL for fault in truth(seen)]
    final = seen.final()
    rewarded = sum(story.reward is not None for story in final.values())
    if rewarded < least * (len(final) + len(seen.refused)):
        found.append(f"{rewarded} of {len(final)} rollouts have a reward, at least {least:.0%} must")
    return found


def noticed_s(seen: Seen) -> list[float]:
    """Seconds from the last loss of a place to the failures of the attempts that began there before it served again,
    ascending.
    """
    found = []
    for story in seen.stories:
        for attempt in story.attempts:
            if (failed := attempt.failed) is None:
                continue
            of_place = [one for one in seen.losses if one.name == attempt.place and one.at <= failed]
            if of_place and attempt.began < _until(last := max(of_place, key=lambda one: one.at)):
                found.append(failed - last.at)
    return sorted(found)


def waits(seen: Seen) -> list[tuple[float, str, str]]:
    """The seconds that each rollout waited for each lost host that it depended on, with both names, ascending.

    A rollout depends on its driver until its end, and on the node, the gate and the gate's one engine of an attempt
    until that is over or has failed. It waits until then or until the host is back, what its agent does meanwhile
    included. A driver that is lost for good takes the attempt along: then the rollout waits for the driver alone.
    """
    found = []
    for story in seen.stories:
        for began, over, names in _dependences(seen, story):
            for loss in seen.losses:
                seconds = min(over, _until(loss)) - max(began, loss.at)
                if loss.name in names and seconds > 0:
                    found.append((seconds, story.rollout_id, loss.name))
    return sorted(found)


def _dependences(seen: Seen, story: Story) -> Iterator[tuple[float, float, set[str]]]:
    """From when to when a rollout depends on which hosts."""
    ended = story.ended if story.ends else inf
    yield story.created, ended, {story.driver}
    if story.reason == HOME_LOST:
        lost = [loss.at for loss in seen.losses if loss.name == story.driver and loss.at >= story.created]
        ended = min([ended, *lost])
    begins = [attempt.began for attempt in story.attempts[1:]]
    for attempt, following in zip(story.attempts, [*begins, ended], strict=True):
        over = min(following, ended) if attempt.failed is None else attempt.failed
        yield attempt.began, over, {attempt.node, attempt.gate, seen.engines.get(attempt.gate, "")}


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)]


def lines(seen: Seen) -> list[str]:
    """The report, for people."""
    final = seen.final().values()
    rewards = Counter("none" if story.reward is None else f"{story.reward:g}" for story in final)
    failures = Counter(story.reason for story in final if story.reason)
    repeated = Counter(attempt.reason for story in seen.stories for attempt in story.attempts if attempt.reason)
    attempts = Counter(len(story.attempts) for story in final)
    drivers = Counter(story.driver for story in final)
    restarted = sum(story.reason == HOME_LOST for story in seen.stories)
    unread = Counter(story.unread for story in seen.stories if story.unread)
    calls = sum(len(story.calls or {}) for story in seen.stories)
    times = noticed_s(seen)
    report = [
        f"rollouts ended      {len(final)} in {seen.seconds:.1f} s; refused {len(seen.refused)}",
        f"rewards             {dict(sorted(rewards.items()))}",
        f"failures            {dict(failures.most_common())}",
        f"attempts            {dict(sorted(attempts.items()))}",
        f"failed attempts     {dict(repeated.most_common())}",
        f"by driver           {dict(sorted(drivers.items()))}; HOME_LOST and created again {restarted}",
        f"calls compared      {calls} with the engines' log; trajectories not read {dict(unread)}",
        f"sampled again       {sum(sampled_again(seen, story) for story in seen.stories)} answers of "
        f"{sum(map(len, seen.sampled.values()))}",
        f"slowest rollout     {max((story.ended - story.created for story in seen.stories), default=0):.1f} s",
        f"nothing left after  {seen.left_s:.1f} s; after the first loss {dict(sorted((seen.during or {}).items()))}",
    ]
    report += [f"{loss.name} was lost under  {loss.running} that ran there" for loss in seen.losses]
    if times:
        p50, p99 = percentile(times, 50), percentile(times, 99)
        report.append(f"loss to failure     p50 {p50:.1f} s, p99 {p99:.1f} s, of {len(times)} attempts")
    waiting = waits(seen)
    for what, of_driver in (("hosts  ", False), ("drivers", True)):
        if some := [one for one in waiting if one[2].startswith("d") is of_driver]:
            seconds, rollout_id, name = some[-1]
            report.append(f"waits for lost {what} {len(some)}, the longest {seconds:.1f} s: {rollout_id} for {name}")
    if seen.keys:
        refused = seen.keys - len(seen.accepted_keys)
        report.append(
            f"keys refused        {refused} of {seen.keys}, of attempts at hosts that were cut; by a gate that is back "
            f"after {seen.refused_s:.1f} s"
        )
    return report


def _until(loss: Lost) -> float:
    """When it served again."""
    return loss.served or loss.back or inf


def _was_away(loss: Lost, began: float, until: float) -> bool:
    return until > loss.at + _ON_ITS_WAY_S and (loss.back is None or began < loss.back)
