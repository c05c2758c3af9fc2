"""A moment that several tasks wait for."""

from __future__ import annotations

import asyncio

from penstock_chassis.aio.moment import Moment


async def test_moment_lets_all_waiters_go_once_it_is_set() -> None:
    """Also those that come later; setting it again changes nothing."""
    moment = Moment()
    waiting = [asyncio.create_task(moment.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    moment.set()
    moment.set()
    await asyncio.gather(*waiting, moment.wait())


async def test_cancelled_waiter_leaves_the_moment_to_the_others() -> None:
    moment = Moment()
    cancelled, other = (asyncio.create_task(moment.wait()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    moment.set()
    await other
    assert cancelled.cancelled()
