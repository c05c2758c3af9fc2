// Rollouts by task or by agent: how often they are solved, how long they take.
//
// Invariants: what has no reward counts in no rate (a rollout that is not graded is not 0); one that was cancelled counts in no time.
import { boundedMean, type Estimate, median } from "../lib/estimate";
import type { Row } from "../overview/board";

export type By = "task" | "agent";

/** What all graded rollouts of a task have in common; "one" = there is one only; "none" = none is graded. */
export type Standing = "always 0" | "always 1" | "mixed" | "one" | "none";

export interface Slice {
  /** The task's id, or the agent's name. */
  readonly key: string;
  readonly rows: readonly Row[];
  /** How many agents a task had, or tasks an agent. */
  readonly others: number;
  readonly live: number;
  readonly failed: number;
  readonly graded: number;
  /** The share with the most that a reward can be, with an interval over tasks, of one task over its rollouts. */
  readonly solved: Estimate | null;
  readonly standing: Standing;
  readonly reward: Estimate | null;
  /** Milliseconds. */
  readonly time: number | null;
  readonly calls: number | null;
  readonly tokens: number | null;
  /** When one of them began or ended last: milliseconds since the epoch. */
  readonly last: number;
}

/** Rewards by task, of the rollouts that have one. */
export function rewardsByTask(rows: readonly Row[], valueOf: (row: Row, reward: number) => number = (_, reward) => reward): Map<string, number[]> {
  const found = new Map<string, number[]>();
  for (const row of rows) {
    if (row.reward === null) continue;
    const known = found.get(row.task);
    if (known) known.push(valueOf(row, row.reward));
    else found.set(row.task, [valueOf(row, row.reward)]);
  }
  return found;
}

/** The least and the most that their rewards could be; 0 to 1 where none has one. */
export function rangeOf(rows: readonly Row[]): readonly [number, number] {
  let found: readonly [number, number] | null = null;
  for (const { range } of rows) if (range) found = found ? [Math.min(found[0], range[0]), Math.max(found[1], range[1])] : range;
  return found ?? [0, 1];
}

/** The mean reward. */
export const meanReward = (rows: readonly Row[]): Estimate | null => boundedMean(rewardsByTask(rows), rangeOf(rows));

const isSolved = ({ range }: Row, reward: number): number => Number(reward >= (range?.[1] ?? 1));
const isLost = ({ range, reward }: Row): boolean => reward !== null && reward <= (range?.[0] ?? 0);

/** The share that is solved. */
export const solveRate = (rows: readonly Row[]): Estimate | null => boundedMean(rewardsByTask(rows, isSolved), [0, 1]);

function standingOf(graded: readonly Row[]): Standing {
  if (!graded.length) return "none";
  if (graded.length === 1) return "one";
  if (graded.every((row) => row.reward !== null && isSolved(row, row.reward))) return "always 1";
  return graded.every(isLost) ? "always 0" : "mixed";
}

/** Those that ended by themselves. */
export const finished = (rows: readonly Row[]): Row[] => rows.filter((row) => row.ended !== null && row.state !== "cancelled");

/** Milliseconds that each of them took. */
export const timesOf = (rows: readonly Row[]): number[] => finished(rows).map((row) => (row.ended ?? 0) - row.created);

/** Figures over the rollouts of one task, or of one agent. */
export function sliceOf(key: string, rows: readonly Row[], by: By): Slice {
  const graded = rows.filter((row) => row.reward !== null);
  const ended = finished(rows);
  let last = 0;
  for (const row of rows) last = Math.max(last, row.ended ?? row.created);
  return {
    key,
    rows,
    others: new Set(rows.map((row) => (by === "task" ? row.agent : row.task))).size,
    live: rows.filter((row) => row.ended === null).length,
    failed: rows.filter((row) => row.state === "failed").length,
    graded: graded.length,
    solved: solveRate(graded),
    standing: standingOf(graded),
    reward: meanReward(graded),
    time: median(timesOf(rows)),
    calls: median(ended.map((row) => row.calls)),
    tokens: median(ended.map((row) => row.sampledTokens)),
    last,
  };
}

/** The slices of some rows, the one that something happened in last first. */
export function slicesOf(rows: readonly Row[], by: By): Slice[] {
  const found = new Map<string, Row[]>();
  for (const row of rows) {
    const known = found.get(row[by]);
    if (known) known.push(row);
    else found.set(row[by], [row]);
  }
  return [...found].map(([key, members]) => sliceOf(key, members, by)).sort((a, b) => b.last - a.last || (a.key < b.key ? -1 : 1));
}
