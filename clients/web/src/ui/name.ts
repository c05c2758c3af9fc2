// Names for people: what a rollout or a group is called instead of its id.
//
// Invariants: an id that somebody chose is a name already and stays; what a task's author wrote is cut and made visible.
import { oneLine } from "../rollout/safe";

/** What a driver makes: KIND.HOME.RANDOM, without a home before there were several, with the index in a group. */
const MADE = /^[rg](?:\.[a-z0-9][a-z0-9-]{0,31}\.)?([0-9a-f]{32})(?:-([0-9]+))?$/;
const MOST = 48;

export interface Named {
  readonly id: string;
  readonly task: string;
  readonly agent: string;
  /** Empty = it has none. */
  readonly group: string;
  /** Position in its group. */
  readonly index: number;
}

/** Whether an id is random, so that nobody can read it. */
export const isMade = (id: string): boolean => MADE.test(id);

/** What distinguishes two ids: the first random digits of one that was made. */
const tag = (id: string): string => MADE.exec(id)?.[1]?.slice(0, 4) ?? oneLine(id, MOST);

/** A rollout's name beside its task and agent, from what is known of it: "9f2c #3"; of one whose id somebody chose, the id. */
export function shortName({ id, group = "", index = 0 }: Pick<Named, "id"> & Partial<Named>): string {
  const made = MADE.exec(id);
  if (!made) return oneLine(id, 140);
  if (group) return `${tag(group)} #${index}`;
  return made[2] === undefined ? tag(id) : `${tag(id)} #${made[2]}`;
}

/** A rollout's name by itself: "fix-parser · 9f2c #3 · codex". */
export function rolloutName(rollout: Named): string {
  return isMade(rollout.id) ? joined(rollout, shortName(rollout)) : oneLine(rollout.id, 140);
}

/** A group's name: "fix-parser · 9f2c · codex". */
export function groupName(group: Pick<Named, "id" | "task" | "agent">): string {
  return isMade(group.id) ? joined(group, tag(group.id)) : oneLine(group.id, 140);
}

function joined({ task, agent }: Pick<Named, "task" | "agent">, number: string): string {
  return [oneLine(task, MOST), number, oneLine(agent, MOST)].filter(Boolean).join(" · ");
}
