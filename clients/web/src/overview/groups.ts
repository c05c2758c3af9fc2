// Groups and the reward curve, from the rows: what a group's rewards are, how far apart, and how that goes on over time.
import { spread } from "../compare/spread";
import { groupName, rolloutName } from "../ui/name";
import type { Row } from "./board";

export interface Group {
  readonly id: string;
  /** What people call it. */
  readonly name: string;
  readonly rows: readonly Row[];
  readonly ended: number;
  /** Of its graded rollouts, in the order of their index. */
  readonly rewards: readonly number[];
  readonly mean: number | null;
  /** Standard deviation; 0 of one. */
  readonly spread: number;
  readonly min: number;
  readonly max: number;
  /** The newest policy version of its calls. */
  readonly version: number | null;
  readonly created: number;
}

/** The groups of some rows, oldest first. Rollouts without one are left out. */
export function groupsOf(rows: readonly Row[]): Group[] {
  const found = new Map<string, Row[]>();
  for (const row of rows) {
    if (!row.group) continue;
    const known = found.get(row.group);
    if (known) known.push(row);
    else found.set(row.group, [row]);
  }
  return [...found].map(([id, members]) => groupOf(id, members)).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

function groupOf(id: string, members: Row[]): Group {
  members.sort((a, b) => a.index - b.index);
  const rewards = members.flatMap((row) => (row.reward === null ? [] : [row.reward]));
  const over = spread(rewards);
  const versions = members.flatMap((row) => (row.versions ? [row.versions[1]] : []));
  const first = members[0];
  return {
    id,
    name: groupName({ id, task: first?.task ?? "", agent: first?.agent ?? "" }),
    rows: members,
    ended: members.filter((row) => row.ended !== null).length,
    rewards,
    mean: over?.mean ?? null,
    spread: over?.deviation ?? 0,
    min: over?.least ?? 0,
    max: over?.most ?? 0,
    version: versions.length ? Math.max(...versions) : null,
    created: Math.min(...members.map((row) => row.created)),
  };
}

/** A point of the curve: a group, or a rollout that has none. */
export interface Point {
  readonly id: string;
  readonly name: string;
  readonly isGroup: boolean;
  readonly rewards: readonly number[];
  readonly mean: number;
  readonly min: number;
  readonly max: number;
  readonly spread: number;
  readonly version: number | null;
}

/** The curve: groups with a reward, oldest first; where there are no groups, rollouts in the order in which they ended. */
export function curveOf(rows: readonly Row[], most: number): Point[] {
  const groups = groupsOf(rows).filter((group) => group.mean !== null);
  if (groups.length)
    return groups.slice(-most).map((group) => ({ ...group, mean: group.mean ?? 0, isGroup: true }));
  return rows
    .filter((row) => row.reward !== null && row.ended !== null)
    .sort((a, b) => (a.ended ?? 0) - (b.ended ?? 0))
    .slice(-most)
    .map((row) => {
      const reward = row.reward ?? 0;
      const version = row.versions?.[1] ?? null;
      return { id: row.id, name: rolloutName(row), isGroup: false, rewards: [reward], mean: reward, min: reward, max: reward, spread: 0, version };
    });
}

/** Means over the last `window` points, so that a trend shows through the noise. */
export function smooth(values: readonly number[], window: number): number[] {
  const out: number[] = [];
  let sum = 0;
  values.forEach((value, index) => {
    sum += value;
    const leaving = index >= window ? (values[index - window] ?? 0) : 0;
    sum -= leaving;
    out.push(sum / Math.min(index + 1, window));
  });
  return out;
}
