/**
 * The smallest trainer there is: a policy that has four commands to choose from learns by REINFORCE which one does the task.
 *
 *   node examples/bandit.ts [STEPS [SEED]]        against the services that `penstock up` runs
 *
 * Node.js 22.18 or newer; 22.7 to 22.17 with --experimental-strip-types before the file.
 *
 * Everything but the policy is as for a large one: real agents in sandboxes, their calls from the gate, tokens and logprobs
 * delivered, a verifier's rewards, a step for each group. Last line: the probability of the command that does it.
 */

import { argv } from "node:process";
import { Completion, connect, type Inference, type ModelCall, type Task } from "@penstock/client";

const COMMANDS = ["cat note.txt", "rm note.txt", "cp note.txt out.txt", "touch out.txt"];
const TASK: Task = {
  taskId: "copy-note",
  instruction: "Copy note.txt to out.txt.",
  files: { "note.txt": "the word\n" },
  verifier: { commands: ["cmp note.txt out.txt"] },
};
const RATE = 2;
const N = 6;

/** A policy over the commands: a softmax of one number for each. */
class Policy {
  version = 0;
  readonly #weights = COMMANDS.map(() => 0);

  probabilities(): number[] {
    const powers = this.#weights.map(Math.exp);
    const sum = powers.reduce((one, other) => one + other);
    return powers.map((power) => power / sum);
  }

  /** The command at `point` of [0, 1). */
  choose(point: number): number {
    const probabilities = this.probabilities();
    let command = 0;
    for (let rest = point; rest >= (probabilities[command] ?? 1) && command < COMMANDS.length - 1; command++) {
      rest -= probabilities[command] ?? 1;
    }
    return command;
  }

  /** One step along the gradient of the log probability, by each choice's advantage over its group. */
  learn(chosen: readonly { command: number; reward: number }[]): void {
    const mean = chosen.reduce((sum, { reward }) => sum + reward, 0) / chosen.length;
    const before = this.probabilities();
    for (const { command, reward } of chosen) {
      before.forEach((probability, index) => {
        const gradient = (index === command ? 1 : 0) - probability;
        this.#weights[index] = (this.#weights[index] ?? 0) + (RATE / chosen.length) * (reward - mean) * gradient;
      });
    }
    this.version += 1;
  }
}

/** Numbers in [0, 1) that depend on nothing but what they are for. */
function draw(...key: number[]): number {
  let state = 0x9e3779b9;
  for (const part of key) {
    state = Math.imul(state ^ part, 0x85ebca6b);
    state = Math.imul(state ^ (state >>> 13), 0xc2b2ae35);
    state ^= state >>> 16;
  }
  return (state >>> 0) / 2 ** 32;
}

/** The tokens of an answer, by the model's own template: what it adds to the prompt, up to the token that ends a turn. */
async function tokensOf(inference: Inference, text: string, stops: readonly number[]): Promise<Int32Array> {
  const turn = (role: number, said: string) => ({
    role,
    parts: [{ part: { case: "text" as const, value: { text: said } } }],
  });
  const asked = [turn(3, "?")];
  const prompt = await inference.render({ messages: asked });
  const whole = await inference.render({ messages: [...asked, turn(4, text)] }, { generationPrompt: false });
  const answer = whole.subarray(prompt.length);
  return answer.subarray(0, answer.findIndex((id) => stops.includes(id)) + 1);
}

const [steps = 8, seed = 1] = argv.slice(2).map(Number);
const ps = connect();
const { stopTokenIds } = await ps.inference.info();
const answers = await Promise.all(
  COMMANDS.map((command) => {
    const call = JSON.stringify({ name: "bash", arguments: { command } });
    return tokensOf(ps.inference, `<tool_call>\n${call}\n</tool_call>`, stopTokenIds);
  }),
);
const done = await tokensOf(ps.inference, "Done.", stopTokenIds);
const policy = new Policy();

for (let step = 0; step < steps; step++) {
  const group = await ps.groups.create(TASK, "shell", N, { runId: `bandit-${seed}` });
  const chosen = new Map<string, number>();

  const answer = async (call: ModelCall): Promise<void> => {
    let ids = done;
    const logprobs = new Float32Array(Math.max(done.length, ...answers.map((item) => item.length)));
    if (call.index === 0) {
      const command = policy.choose(draw(seed, step, call.groupIndex ?? 0));
      chosen.set(call.rolloutId, command);
      ids = answers[command] ?? done;
      logprobs[0] = Math.log(policy.probabilities()[command] ?? 1); // the choice is made with the first token; the rest follows
    }
    const completion = Completion.ofTokens(ids, logprobs.subarray(0, ids.length), { policyVersion: policy.version });
    await call.deliver(completion);
  };

  // As many loops as calls may be under way at once: the next free loop takes the next call.
  const calls = group.calls({ credits: N, policyVersion: policy.version });
  const answering = Array.from({ length: N }, async () => {
    for await (const call of calls) {
      await answer(call);
    }
  });
  await Promise.all(answering);

  const graded = [];
  for (const { rollout, outcome } of await group.results()) {
    const command = chosen.get(rollout.rolloutId);
    if (command !== undefined && outcome.reward !== undefined) {
      graded.push({ command, reward: outcome.reward.value }); // one that is not graded is left out: that is not zero
    }
  }
  policy.learn(graded);
  const mean = graded.reduce((sum, { reward }) => sum + reward, 0) / graded.length;
  console.log(`step ${step}: reward ${mean.toFixed(2)}, P(${COMMANDS[2]}) = ${policy.probabilities()[2]?.toFixed(2)}`);
}
console.log(policy.probabilities()[2]);
await ps.close();
