"""`penstock pause`, `resume` and `cancel`: what is done with rollouts and groups that run."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeAlias

import typer
from rich.markup import escape

from penstock.cli.connections import completion
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import running
from penstock.cli.terminal.console import OK, clean, emit, out, run
from penstock.client import GroupHandle, NotFound, Penstock, RolloutHandle, connect

Target = Annotated[
    str,
    typer.Argument(
        metavar="ROLLOUT|GROUP",
        help="The id of a rollout or a group.",
        autocompletion=completion.rollout_ids,
        show_default=False,
    ),
]
Reason = Annotated[str, typer.Option(help="For the record.")]
Handle: TypeAlias = RolloutHandle | GroupHandle


def pause(
    target: Target,
    reason: Reason = "",
    max_duration: Annotated[
        float | None,
        typer.Option(
            "--for", min=1.0, max=86_400.0, metavar="SECONDS", help="Then it goes on; default: the operator's limit."
        ),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Pause a rollout, or each rollout of a group, whatever it does.

    Agents stand still where the backend can freeze a sandbox, else they run up to their next model call. Time limits
    stand still, and slots stay taken. What is being graded ends. A pause that is there already is replaced, with its
    reason and its end.
    """

    async def work(handle: Handle) -> str:
        frozen = await handle.pause(reason, max_duration=max_duration)
        if isinstance(handle, GroupHandle):
            return f"{handle.info.paused_count} of its rollouts are paused"
        until = handle.info.pause and handle.info.pause.end_time
        most = f" until {until:%Y-%m-%d %H:%M:%S} UTC at the latest" if until else ""
        return f"is paused{most}" + (", its sandbox is frozen" if frozen else "")

    _control(target, work, as_json, state_dir)


def resume(target: Target, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Let a paused rollout, or a group's rollouts, go on."""

    async def work(handle: Handle) -> str:
        await handle.resume()
        return "goes on" if isinstance(handle, GroupHandle) or not handle.info.outcome else "has ended"

    _control(target, work, as_json, state_dir)


def cancel(target: Target, reason: Reason = "", as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """End a rollout, or each rollout of a group; an ended one keeps its outcome.

    It returns when agents and sandboxes are gone.
    """

    async def work(handle: Handle) -> str:
        await handle.cancel(reason)
        return "has ended"

    _control(target, work, as_json, state_dir)


def _control(target: str, work: Callable[[Handle], Awaitable[str]], as_json: bool, state_dir: Any) -> None:
    async def controlled() -> int:
        async with connect(running(state_dir)) as ps:
            handle = await _found(ps, target)
            done = await work(handle)
            is_group = isinstance(handle, GroupHandle)
            if as_json:
                emit(_facts(handle))
            else:
                out.print(escape(clean(f"{'group' if is_group else 'rollout'} {target}: {done}")), soft_wrap=True)
        return OK

    run(controlled())


def _facts(handle: Handle) -> dict[str, Any]:
    if isinstance(handle, RolloutHandle):
        return {"rollout_id": handle.rollout_id, "phase": handle.info.phase, "pause": handle.info.pause}
    group = handle.info
    return {
        "group_id": group.group_id,
        "paused": group.paused_count,
        "ended": group.ended_count,
        "rollouts": len(group.rollout_ids),
    }


async def _found(ps: Penstock, target: str) -> Handle:
    """The rollout of this id, or else the group. Raises NotFound."""
    try:
        return await ps.rollouts.attach(target)
    except NotFound as unknown:
        try:
            return await ps.groups.attach(target)
        except NotFound:
            raise unknown from None
