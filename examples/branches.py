"""What another answer would have led to: a rollout, and branches from each of its calls.

Services run (`penstock up --model-dir DIR`), and their model answers. Usage: python branches.py [AGENT]
"""

import asyncio
import sys

from penstock.client import Command, Mode, RewardFrom, Task, Verifier, connect

TASK = Task(
    task_id="hello",
    instruction="Write the word hello to out.txt.",
    verifier=Verifier(commands=[Command(shell="grep -q hello out.txt")], reward=RewardFrom.PASSED_SHARE),
)


async def main(agent: str) -> None:
    """Prints the parent's reward, and the mean of its branches from each of its calls."""
    async with connect() as ps:
        parent = await ps.rollouts.create(TASK, agent, mode=Mode.TRANSPARENT_PROXY)
        result = await parent.result()
        print(parent.rollout_id, "reward", result.reward and result.reward.value)
        for call in (await parent.trajectory()).calls:
            group = await parent.branch(call.index, n=4)
            rewards = [one.reward.value for one in await group.results() if one.reward is not None]
            print(f"call {call.index}: {sum(rewards) / len(rewards) if rewards else None} in {len(rewards)} branches")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["shell"])))
