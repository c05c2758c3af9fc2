"""A model plays the user: it asks the agent for more, until it is content. Its tokens are never trained.

Services run (`penstock up --model-dir DIR`). The user's model is an inference service of the gate's settings, by its
name; without one, the default service. Usage: python simulated_user.py [AGENT [MODEL]]
"""

import asyncio
import sys

from penstock.client import Command, Inference, Mode, RewardFrom, Task, User, UserTurn, Verifier, connect

TASK = Task(
    task_id="hello",
    instruction="Write the word hello to out.txt.",
    verifier=Verifier(commands=[Command(shell="grep -q hello out.txt")], reward=RewardFrom.PASSED_SHARE),
)
PROMPT = "You test a coding agent. Ask it to show the file, then to add the word world. Then you are content."


async def main(agent: str = "shell", model: str = "") -> None:
    """Prints the conversation, and whose tokens are trained."""
    user = User(prompt=PROMPT, source=Inference(model), max_instructions=3, max_tokens=100)
    async with connect() as ps:
        rollout = await ps.rollouts.create(TASK, agent, mode=Mode.TRANSPARENT_PROXY, user=user)
        async for event in rollout.events():
            if isinstance(turn := event.payload, UserTurn):
                print(f"agent: {turn.agent_message!r}\nuser: {turn.instruction or turn.end_reason!r}")
        trajectory = await rollout.trajectory()
        print(f"{len(trajectory.calls)} calls of the agent, {len(trajectory.user_calls)} of the user")
        print("trained:", sum(int(sample.loss_mask.sum()) for sample in trajectory.samples), "tokens of the agent's")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
