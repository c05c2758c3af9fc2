"""A trainer that learns each turn by its own advantage, as branches measure it.

An agent writes three words, and only the second one decides the reward. With one advantage for the whole rollout, a
policy gradient would push the other two as well, up or down by chance. Here the policy is a softmax over words for each
turn; a model is trained by `credit.token_advantages(sample)`, which has the same advantages for each token.

Services run (`penstock up --model-dir DIR`: any model, for its tokenizer).
Usage: python turn_advantages.py [STEPS [SEED]]
"""

import asyncio
import json
import sys

import numpy as np
from numpy.typing import NDArray

from penstock.analysis import credit
from penstock.client import Command, Completion, Message, Prompt, RewardFrom, Role, Task, ToolCall, Verifier, connect

WORDS, TURNS, N, RATE = ("amber", "birch", "cedar"), 3, 3, 4.0
TASK = Task(
    task_id="second-word",
    instruction="Write three words to words.txt.",
    verifier=Verifier(commands=[Command(shell="sed -n 2p words.txt | grep -q cedar")], reward=RewardFrom.PASSED_SHARE),
)


async def main(steps: int = 4, seed: int = 1) -> None:
    """Prints for each step the mean reward, and how likely the right word is at each turn."""
    draw, logits, chosen = np.random.default_rng(seed), np.zeros((TURNS, len(WORDS))), dict[str, int]()
    run_id, version = f"turns-{seed}", 0
    async with connect() as ps, ps.intercept(run_id=run_id) as session, asyncio.TaskGroup() as tasks:
        stops = (await ps.inference.info()).stop_token_ids
        asked = Message.of(Role.USER, "?")
        before = len(await ps.inference.render(Prompt(messages=[asked])))

        async def tokens(answer: Message) -> NDArray[np.int32]:
            """What the model's template makes of an answer, up to the token that ends a turn."""
            whole = await ps.inference.render(Prompt(messages=[asked, answer]), add_generation_prompt=False)
            return whole[before : before + int(np.isin(whole[before:], stops).argmax()) + 1]

        lines = [json.dumps({"command": f"echo {word} >> words.txt"}) for word in WORDS]
        turns = [await tokens(Message(Role.ASSISTANT, (ToolCall("1", "bash", line),))) for line in lines]
        done = await tokens(Message.of(Role.ASSISTANT, "Done."))

        def policy() -> NDArray[np.float64]:
            powers = np.exp(logits)
            shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
            return shares

        async def answer() -> None:
            async for call in session.calls():  # of rollouts and of their branches: they have one run
                ids, logprobs = done, np.zeros(len(done), np.float32)
                if call.index < TURNS:
                    word = chosen[call.call_id] = int(draw.choice(len(WORDS), p=policy()[call.index]))
                    ids, logprobs = turns[word], np.zeros(len(turns[word]), np.float32)
                    logprobs[0] = np.log(policy()[call.index, word])  # the turn follows from its first token
                await call.deliver(Completion.of_tokens(ids, logprobs, policy_version=version))

        tasks.create_task(answer())
        for step in range(steps):
            group = await ps.groups.create(TASK, "shell", N, run_id=run_id)
            results = await group.results()
            found = await credit.of(ps, results, budget=2 * N * TURNS, n=2)  # two branches of each turn but the first
            gradient = np.zeros_like(logits)
            for turn in (turn for one in found.values() for turn in one.turns if turn.index < TURNS):
                score = (np.arange(len(WORDS)) == chosen[turn.call_id]) - policy()[turn.index]
                gradient[turn.index] += (turn.advantage or 0.0) * score
            logits += RATE * gradient / max(1, len(found))
            version += 1
            session.announce(version)
            mean = sum(one.reward for one in found.values()) / max(1, len(found))
            print(f"step {step}: reward {mean:.2f}, P(cedar) by turn", *policy()[:, 2].round(3), flush=True)
        session.finish()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
