"""Misuses of the client; never run. Each line with an `ignore` is an error, of the kind that it names."""

from penstock.client import Penstock, Task, sync

TASK = Task(task_id="t", instruction="i")


def without_await(ps: sync.Penstock) -> None:
    """Each mistake is found before the program runs."""
    ps.groups.create("no task", 5, "eight", nonsense=True)  # type: ignore[arg-type,call-arg]
    group = ps.groups.create(TASK, "shell", 8)
    for call in group.calls():
        call.delivr(1)  # type: ignore[attr-defined]
        call.deliver(b"no completion")  # type: ignore[arg-type]
        call.prompt_count = 3  # type: ignore[misc]
    group.results(nonsense=1)  # type: ignore[call-arg]
    ps.rollouts.create(TASK, "shell", n="two")  # type: ignore[call-overload]
    ps.rollouts.create(TASK, "shell", seed="one")  # type: ignore[call-overload]
    ps.nothing  # type: ignore[attr-defined]  # noqa: B018
    ps.sandboxes.create().run("true", timeout="1 s")  # type: ignore[arg-type]
    ps.sandboxes.create().start(["cat"], pty=80)  # type: ignore[arg-type]
    ps.gate.open(run="r")  # type: ignore[call-arg]
    ps.gate.revoke_keys()  # type: ignore[call-arg]
    ps.operations.server_info("gate")  # type: ignore[arg-type]
    sync.connect(port=7701)  # type: ignore[call-arg]
    for _ in ps.gate.lease_calls().calls:  # type: ignore[attr-defined]
        pass
    result: int = ps.inference.generate([1])  # type: ignore[assignment]
    assert result


async def with_await(ps: Penstock) -> None:
    """The same mistakes with await."""
    await ps.groups.create("no task", 5, "eight", nonsense=True)  # type: ignore[arg-type,call-arg]
    await ps.inference.render([1, 2])  # type: ignore[arg-type]
    await ps.gate.issue_key(7)  # type: ignore[arg-type]
