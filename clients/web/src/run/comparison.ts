// Two runs beside each other, task by task, and over the tasks that both have.
import { type Estimate, difference } from "../lib/estimate";
import { type Paired, pairedDifference } from "../lib/paired";
import { rangeOf, rewardsByTask, type Slice, slicesOf } from "../tasks/model";
import type { Run } from "./model";

export interface ComparedTask {
  readonly task: string;
  readonly left: Slice | null;
  readonly right: Slice | null;
  /** How much more of the right one is solved; null where one of them has no graded rollout of the task. */
  readonly more: Estimate | null;
}

/** All tasks of two runs: first those that both have, the largest difference first. */
export function comparedTasks(left: Run, right: Run): ComparedTask[] {
  const [a, b] = [left, right].map((run) => new Map(slicesOf(run.rows, "task").map((slice) => [slice.key, slice])));
  if (!a || !b) return [];
  return [...new Set([...a.keys(), ...b.keys()])]
    .map((task) => {
      const [one, other] = [a.get(task) ?? null, b.get(task) ?? null];
      return { task, left: one, right: other, more: one?.solved && other?.solved ? difference(one.solved, other.solved) : null };
    })
    .sort((x, y) => Number(x.more === null) - Number(y.more === null) || Math.abs(y.more?.value ?? 0) - Math.abs(x.more?.value ?? 0) || (x.task < y.task ? -1 : 1));
}

/** How much more a run earned than another over the tasks that both have graded rollouts of; null where those are fewer than two. */
export function pairedRuns(first: Run, other: Run): Paired | null {
  const [least, most] = rangeOf([...first.rows, ...other.rows]);
  return pairedDifference(rewardsByTask(first.rows), rewardsByTask(other.rows), most - least);
}
