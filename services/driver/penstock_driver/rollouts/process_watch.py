"""Watches a process's output and exit, and enforces its limit if the sandbox service is too busy to.

Invariants: a sandbox is lost when it is silent, never because it is slow. Unread output counts as a sign of life,
however long after the limit a busy driver or service reads it. So an agent that floods its output is not retried as if
the infrastructure had failed (R43, R96). The driver kills any process that nothing else ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import PenstockError
from penstock_driver.domain.ports import Exit, ExitReason, Output, Sandboxes
from penstock_driver.domain.rollout import Cause, Component, Phase, failed

MARGIN_S: Final = 30.0
"""The driver kills a process this long after its own limit, and then waits as long for a response."""
_LOOK_S: Final = 0.05
"""How often at most it looks again at a process that is held shortly before its limit."""


async def watched(
    sandboxes: Sandboxes,
    sandbox_id: str,
    process_id: str,
    limit_s: float,
    *,
    what: str,
    margin_s: float = MARGIN_S,
    held_s: Callable[[], float] = lambda: 0.0,
) -> AsyncGenerator[Output | Exit, None]:
    """Yield a process's output as it comes, then its exit; `limit_s` is its limit at the sandbox service.

    A process that has not ended within `margin_s` of its limit is killed with all that it started, which reports
    TIMED_OUT. `what` names it in messages. A caller that stops early closes this generator. `held_s` returns for how
    long its limit has stood still, from any moment on.

    RolloutFailed (SANDBOX_UNRESPONSIVE) if nothing arrives for `margin_s` after that.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time() + limit_s + margin_s - held_s()

    def left_s() -> float:
        return begin + held_s() - loop.time()

    killed, problem = False, ""
    async with aclosing(sandboxes.watch(sandbox_id, process_id)) as items:
        # One task per item, which outlives the wait limit: cancelling it would end the stream.
        waiting = asyncio.ensure_future(anext(items, None))
        try:
            while True:
                await asyncio.wait([waiting], timeout=margin_s if killed else max(_LOOK_S, left_s()))
                if not killed and not waiting.done() and left_s() > 0:
                    continue  # its limit stood still meanwhile
                if not killed and left_s() <= 0:
                    killed = True
                    try:
                        await sandboxes.kill(sandbox_id, process_id)
                    except PenstockError as error:
                        problem = f": {error.message}"  # later output may explain more
                    continue
                if not waiting.done():
                    message = f"{what} exceeded its time limit, and its sandbox neither ended it nor answered{problem}"
                    raise failed(
                        Cause.INFRASTRUCTURE,
                        "SANDBOX_UNRESPONSIVE",
                        message,
                        Phase.RUNNING,
                        retriable=True,
                        component=Component.SANDBOX,
                    )
                item = waiting.result()
                if item is None:
                    return
                if killed and isinstance(item, Exit) and item.reason is ExitReason.KILLED:
                    item = replace(item, reason=ExitReason.TIMED_OUT)
                yield item
                waiting = asyncio.ensure_future(anext(items, None))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
