/** The rewards of a group on one line: a dot for each sibling, a tick for the mean. */

import type { RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";
import { figure } from "../rollout/words";
import { rewardOf, spread } from "./spread";

interface Props {
  readonly rollouts: readonly RolloutSummary[];
  readonly chosen: readonly [string, string] | undefined;
  readonly onChoose: (rollout: RolloutSummary) => void;
}

const WIDTH = 600;
const HEIGHT = 64;
const EDGE = 14;
const RADIUS = 6;
/** Dots that would lie upon each other are stacked by this much. */
const STACK = 7;

export function RewardStrip({ rollouts, chosen, onChoose }: Props) {
  const graded = rollouts.filter((rollout) => rewardOf(rollout) !== undefined);
  const first = graded[0]?.reward;
  if (!first) return null;
  const width = first.rangeMax - first.rangeMin || 1;
  const x = (value: number): number => EDGE + ((value - first.rangeMin) / width) * (WIDTH - 2 * EDGE);
  const taken = new Map<number, number>();
  const mean = spread(graded.map((rollout) => rewardOf(rollout) ?? 0))?.mean ?? 0;
  return (
    <svg class="strip" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Rewards of ${graded.length} siblings, mean ${figure(mean)}`}>
      <line x1={EDGE} x2={WIDTH - EDGE} y1={44} y2={44} class="strip-axis" />
      <line x1={x(mean)} x2={x(mean)} y1={10} y2={50} class="strip-mean" />
      {graded.map((rollout) => {
        const at = x(rewardOf(rollout) ?? 0);
        const slot = Math.round(at / RADIUS);
        const depth = taken.get(slot) ?? 0;
        taken.set(slot, depth + 1);
        const side = chosen?.indexOf(rollout.rolloutId) ?? -1;
        return (
          <circle key={rollout.rolloutId} cx={at} cy={Math.max(RADIUS, 44 - depth * STACK)} r={RADIUS} class={side < 0 ? "strip-dot" : "strip-dot strip-chosen"} onClick={() => onChoose(rollout)}>
            <title>{`Rollout ${rollout.index}: ${figure(rewardOf(rollout) ?? 0)}`}</title>
          </circle>
        );
      })}
      <text x={EDGE} y={61} class="strip-end">
        {figure(first.rangeMin)}
      </text>
      <text x={WIDTH - EDGE} y={61} class="strip-end" text-anchor="end">
        {figure(first.rangeMax)}
      </text>
    </svg>
  );
}
