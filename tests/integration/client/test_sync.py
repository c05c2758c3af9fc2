"""The client without await."""

import ast
import asyncio
import threading
from pathlib import Path

import pytest
from tests.integration.client.conftest import TASK

from penstock.client import Output, Selector, sync
from penstock.local.stack import LocalStack


async def test_a_trainer_without_await_does_the_same(stack: LocalStack) -> None:
    """The facade has the same names and gives the same values."""

    def trainer() -> float:
        with sync.connect(stack.endpoints) as ps:
            assert ps.inference.info().engine == "scripted"
            handle = ps.rollouts.create(TASK, "shell")
            for call in handle.calls():
                call.deliver(ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id))
            result = handle.result()
            trajectory = handle.trajectory(samples_only=True)
            assert trajectory.samples and result.reward is not None
            with ps.intercept(run_id="none") as session:
                assert session.pause() == 0
                session.resume()
            with ps.sandboxes.create() as sandbox:
                assert sandbox.run(["true"]).exit.ok
                if "live_fork" in ps.sandboxes.backends()[0].capabilities:
                    (child,) = [fork.made() for fork in sandbox.fork(1)]
                    with child:
                        assert child.run(["true"]).exit.ok
            return float(result.reward.value)

    assert await asyncio.to_thread(trainer) == 0.75


async def test_connection_without_a_block_lasts_until_it_is_closed(stack: LocalStack) -> None:
    """Its thread ends with it, and a second close does nothing."""

    def program() -> None:
        ps = sync.connect(stack.endpoints)
        assert ps.operations.status("driver").service == "driver"
        sandbox = ps.sandboxes.create()
        process = sandbox.start(["cat"], stdin=True)
        process.write(b"text")
        process.close_stdin()
        assert [item.data for item in process.output() if isinstance(item, Output)] == [b"text"]
        assert {type(sandbox).__name__, type(process).__name__} == {"SandboxHandle", "ProcessHandle"}
        sandbox.delete()
        ps.close()
        ps.close()
        with pytest.raises(RuntimeError, match="closed"):
            ps.operations.status("driver")

    await asyncio.to_thread(program)
    assert "penstock-sync" not in {thread.name for thread in threading.enumerate()}


async def test_calls_leased_without_a_session_are_wrapped(stack: LocalStack) -> None:
    """Those in a list are objects of the synchronous client too."""

    def program() -> None:
        with sync.connect(stack.endpoints) as ps:
            rollout = ps.rollouts.create(TASK, "shell")
            while rollout.refresh().outcome is None:
                for call in ps.gate.lease_calls(Selector(rollout_ids=[rollout.rollout_id]), wait=0.5):
                    assert type(call).__mro__[:2] == (sync.LeasedCall, sync.ModelCall) and call.extend()
                    answer = ps.inference.generate(call.prompt_token_ids, call.sampling, session_id=call.rollout_id)
                    call.deliver(answer)
            reward = rollout.result().reward
            assert reward is not None and reward.value == 0.75

    await asyncio.to_thread(program)


def test_wrapper_has_what_its_stub_promises() -> None:
    """Each class and each of its public names."""
    stub = ast.parse(Path(sync.__file__).with_suffix(".pyi").read_text())
    classes = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes} == {live.__name__ for live in sync.LIVE}
    for node, live in zip(classes, sync.LIVE, strict=True):
        assert isinstance(getattr(sync, node.name), type)
        names = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name[0] != "_"}
        public = {name for name in vars(live) if name[0] != "_" and callable(vars(live)[name])}
        assert public <= names
