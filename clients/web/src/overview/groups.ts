// Groups, from the rows: what a group's rewards are, and how far apart.
import { spread } from "../compare/spread";
import { groupName } from "../ui/name";
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
