// The rollouts of a task by the policy version that sampled them, and which two of them are put side by side.
//
// Invariants: versions of two runs are never pooled, since each run counts its own; a rollout counts once, at the version that it began
// with, as in a run's curves; the two are never one.
import { type Estimate, mean } from "../lib/estimate";
import { href } from "../lib/router";
import type { Row } from "../overview/board";
import { refOf } from "../run/model";
import { meanReward, solveRate } from "./model";

/** Where a task's rollouts are by policy version: of one run and agent, and with a rollout on the left, where they are given. */
export function versionsPlace(task: string, asked: { readonly run?: string; readonly agent?: string; readonly left?: string } = {}): string {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value)).toString();
  return `${href("/tasks", task, "versions")}${query && `?${query}`}`;
}

/** The rollouts of one policy version of one run. */
export interface VersionSlice {
  readonly key: string;
  /** As addresses have it; empty = they belong to no run. */
  readonly run: string;
  readonly version: number;
  /** Newest first. */
  readonly rows: readonly Row[];
  readonly graded: number;
  readonly solved: Estimate | null;
  readonly reward: Estimate | null;
}

export type Pair = readonly [Row, Row];

/** By run, the one that began last first, and by version, the oldest first. Rollouts of unknown versions are left out. */
export function versionSlices(rows: readonly Row[]): VersionSlice[] {
  const found = new Map<string, Map<number, Row[]>>();
  for (const row of [...rows].sort((a, b) => b.created - a.created)) {
    if (!row.versions) continue;
    const run = row.run ? refOf(row) : "";
    const versions = found.get(run) ?? new Map<number, Row[]>();
    found.set(run, versions);
    const known = versions.get(row.versions[0]);
    if (known) known.push(row);
    else versions.set(row.versions[0], [row]);
  }
  return [...found].flatMap(([run, versions]) =>
    [...versions]
      .sort(([a], [b]) => a - b)
      .map(([version, members]) => ({
        ...{ key: `${run} ${version}`, run, version, rows: members, solved: solveRate(members), reward: meanReward(members) },
        graded: members.filter((row) => row.reward !== null).length,
      })),
  );
}

/** The agent that is compared: the one asked for, that of a rollout asked for, else the one with the most rollouts. */
export function agentOf(rows: readonly Row[], asked: string | null, ids: readonly (string | null)[]): string {
  const counts = new Map<string, number>();
  for (const { agent } of rows) counts.set(agent, (counts.get(agent) ?? 0) + 1);
  if (asked !== null && counts.has(asked)) return asked;
  const row = rows.find(({ id }) => ids.includes(id));
  return row?.agent ?? [...counts].sort(([a, many], [b, few]) => few - many || (a < b ? -1 : 1))[0]?.[0] ?? "";
}

/** A rollout that stands for some: of the graded ones the one whose reward is nearest to their mean, else the newest. */
export function typicalOf(rows: readonly Row[]): Row | undefined {
  const graded = rows.flatMap((row) => (row.reward === null ? [] : [{ row, reward: row.reward }]));
  if (!graded.length) return rows.find((row) => row.calls > 0 && row.ended !== null) ?? rows[0];
  const middle = mean(graded.map(({ reward }) => reward));
  return graded.reduce((best, next) => (Math.abs(next.reward - middle) < Math.abs(best.reward - middle) ? next : best)).row;
}

/**
 * What stands side by side: the two that are asked for; else beside the one that is, or without any, typical rollouts of the oldest
 * and the newest version of its run, or of all where its run has one version. Undefined = there are no two versions.
 */
export function pairOf(slices: readonly VersionSlice[], left: string | null, right: string | null): Pair | undefined {
  const known = (id: string | null) => (id === null ? undefined : slices.flatMap(({ rows }) => rows).find((row) => row.id === id));
  const [a, b] = [known(left), known(right)];
  if (a && b && a !== b) return [a, b];
  const fixed = a ?? b;
  const at = fixed && slices.find(({ rows }) => rows.includes(fixed));
  const run = (at ?? slices[0])?.run;
  const own = slices.filter((slice) => slice.run === run);
  const among = own.length > 1 ? own : slices;
  const [oldest, newest] = [among[0], among.at(-1)];
  if (!oldest || !newest || oldest === newest) return undefined;
  if (!fixed) return pairOfSlices(oldest, newest);
  const other = typicalOf((at === newest ? oldest : newest).rows);
  if (!other) return undefined;
  return a ? [a, other] : [other, fixed];
}

function pairOfSlices(left: VersionSlice, right: VersionSlice): Pair | undefined {
  const [a, b] = [typicalOf(left.rows), typicalOf(right.rows)];
  return a && b ? [a, b] : undefined;
}

/** The pair after a version was chosen for one side; where its one rollout stands on the other side, the two change places. */
export function withVersion(pair: Pair, side: 0 | 1, slice: VersionSlice): Pair {
  const other = pair[1 - side];
  const next = typicalOf(slice.rows.filter((row) => row.id !== other?.id));
  return next ? withRollout(pair, side, next) : [pair[1], pair[0]];
}

/** The pair after a rollout was chosen for one side. */
export function withRollout(pair: Pair, side: 0 | 1, row: Row): Pair {
  if (pair[1 - side]?.id === row.id) return [pair[1], pair[0]];
  return side === 0 ? [row, pair[1]] : [pair[0], row];
}

/** "version 3", or "versions 3–5" of one that several sampled. */
export function versionWords({ versions }: Pick<Row, "versions">): string {
  if (!versions) return "version unknown";
  return versions[0] === versions[1] ? `version ${versions[0]}` : `versions ${versions[0]}–${versions[1]}`;
}
