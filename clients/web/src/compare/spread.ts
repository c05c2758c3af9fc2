/** Figures over a group's rewards, and which two siblings to put side by side. */

import { Phase, type RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";

export interface Spread {
  readonly count: number;
  readonly mean: number;
  readonly deviation: number;
  readonly least: number;
  readonly most: number;
}

/** Of the rewards that there are; undefined = none. The deviation is that of the population, as GRPO divides by. */
export function spread(rewards: readonly number[]): Spread | undefined {
  if (rewards.length === 0) return undefined;
  const least = Math.min(...rewards);
  const most = Math.max(...rewards);
  // The rounded mean of equal rewards is seldom that reward, and would show a deviation where there is none.
  const mean = least === most ? least : rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
  const variance = rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length;
  return { count: rewards.length, mean, deviation: Math.sqrt(variance), least, most };
}

/** How far a reward is from its group's mean in deviations; undefined where nothing sets the siblings apart. */
export function advantage(reward: number, over: Spread): number | undefined {
  return over.deviation > 0 ? (reward - over.mean) / over.deviation : undefined;
}

/** How a group stands at a glance: busy while one runs, a warning where one failed, else good. */
export function groupTone(rollouts: readonly RolloutSummary[]): "busy" | "warn" | "good" {
  if (rollouts.length === 0 || rollouts.some((rollout) => rollout.phase !== Phase.ENDED)) return "busy";
  return rollouts.some((rollout) => rollout.failure) ? "warn" : "good";
}

export const rewardOf = (rollout: RolloutSummary): number | undefined => rollout.reward?.value;

/** The best and the worst by reward; where rewards do not differ, the first two. Undefined with fewer than two siblings. */
export function bestAndWorst(rollouts: readonly RolloutSummary[]): readonly [string, string] | undefined {
  const graded = rollouts.filter((rollout) => rewardOf(rollout) !== undefined);
  const sorted = [...graded].sort((a, b) => (rewardOf(b) ?? 0) - (rewardOf(a) ?? 0) || a.index - b.index);
  const rest = rollouts.filter((rollout) => rewardOf(rollout) === undefined);
  const order = [...sorted, ...rest];
  const best = order[0];
  const worst = graded.length > 1 ? sorted.at(-1) : order[1];
  return best && worst && best !== worst ? [best.rolloutId, worst.rolloutId] : undefined;
}
