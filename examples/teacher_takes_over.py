"""A teacher takes over at call t: the student learns from what it did before, and no token of the teacher is trained.

Services run (`penstock up --model-dir DIR`). The teacher is an inference service of the gate's settings, by its name;
without one, the default service. Usage: python teacher_takes_over.py [AGENT [T [TEACHER]]]
"""

import asyncio
import sys

from penstock.client import CallRule, Command, Inference, Mode, RewardFrom, RolloutModel, Task, Verifier, connect

TASK = Task(
    task_id="hello",
    instruction="Write the word hello to out.txt.",
    verifier=Verifier(commands=[Command(shell="grep -q hello out.txt")], reward=RewardFrom.PASSED_SHARE),
)


async def main(agent: str = "shell", t: str = "1", teacher: str = "") -> None:
    """Prints who answered each call, and what each sample trains."""
    models = [
        RolloutModel(policy_id="teacher", source=Inference(teacher), trained=False, calls=CallRule(from_index=int(t))),
        RolloutModel(policy_id="student"),
    ]
    async with connect() as ps:
        rollout = await ps.rollouts.create(TASK, agent, mode=Mode.TRANSPARENT_PROXY, models=models)
        result = await rollout.result()
        print(rollout.rollout_id, "reward", result.reward and result.reward.value)
        trajectory = await rollout.trajectory()
        for call in trajectory.calls:
            print(f"call {call.index}: {call.sampled_count} tokens of {call.policy_id}")
        for sample in trajectory.samples:
            print(f"sample of {sample.policy_id}: trains {sample.loss_mask.sum()} of {len(sample)} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
