"""The client without await."""

import asyncio

from tests.integration.client.conftest import TASK

from penstock.client import sync
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
