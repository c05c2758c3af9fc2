"""What changes something, with --allow-writes: start rollouts, cancel them."""

import asyncio
from typing import Annotated, Final

from pydantic import Field

from penstock.assistant.answers import Answer
from penstock.assistant.context import Context
from penstock.assistant.errors import ToolError
from penstock.assistant.tools.base import Arguments, Name, PathName, Tool
from penstock.client import Mode, NotFound, Task
from penstock.tasks.images import with_image

STARTED_BY: Final = "started_by"
"""Label of rollouts that an assistant started."""


class _Start(Arguments):
    path: PathName
    agent: Annotated[str, Field(min_length=1, max_length=200, description="An agent's name, from `agents`.")]
    n: Annotated[int, Field(ge=1, le=64, description="How many rollouts of the task.")] = 1
    run_id: Annotated[Name, Field(description="A run for them, apart from those of trainers; empty: `assistant`.")] = ""


class _Cancel(Arguments):
    id: Annotated[str, Field(min_length=1, max_length=200, description="A rollout, or a group with all its rollouts.")]
    reason: Annotated[str, Field(min_length=1, max_length=200, description="Why, for the record.")]


async def _start(context: Context, given: _Start) -> Answer:
    task = with_image(await asyncio.to_thread(Task.load, context.place(given.path)))
    if given.n > context.may_start:
        raise ToolError(
            f"n: this server may start {context.may_start} more rollouts",
            reason="ROLLOUTS_LIMIT",
            advice="ask the user to start the server with a greater --max-rollouts",
        )
    context.may_start -= given.n  # before anything is awaited: two calls share it
    try:
        async with context.connected() as ps:
            group = await ps.groups.create(
                task,
                given.agent,
                given.n,
                run_id=given.run_id or "assistant",
                mode=Mode.TRANSPARENT_PROXY,
                labels={STARTED_BY: "assistant"},
            )
    except BaseException:
        context.may_start += given.n
        raise
    return Answer(
        {
            "group_id": group.group_id,
            "rollout_ids": group.rollout_ids,
            "run_id": given.run_id or "assistant",
            "may_start": context.may_start,
            "next": "`groups` shows how they end",
        }
    )


async def _cancel(context: Context, given: _Cancel) -> Answer:
    reason = f"by an assistant: {given.reason}"
    async with context.connected() as ps:
        try:
            rollout = await ps.rollouts.attach(given.id)
        except NotFound as unknown:
            try:
                group = await ps.groups.attach(given.id)
            except NotFound:
                raise unknown from None
            await group.cancel(reason)
            return Answer({"group_id": group.group_id, "ended": group.info.ended_count, "of": len(group.rollout_ids)})
        await rollout.cancel(reason)
        return Answer({"rollout_id": rollout.rollout_id, "phase": rollout.info.phase})


WRITING: Final = (
    Tool(
        "start_rollouts",
        "Start rollouts of a task file. The services' own model answers; no trainer gets them. Only when the user asked"
        " for it.",
        _Start,
        _start,
        writes=True,
    ),
    Tool(
        "cancel",
        "End a rollout, or each rollout of a group: that cannot be undone. Only when the user asked for it.",
        _Cancel,
        _cancel,
        writes=True,
        destroys=True,
    ),
)
