/** A group as a page follows it: its rollouts as they stand, and the captures of the two that are compared. */

import { Code } from "@connectrpc/connect";
import { computed, type ReadonlySignal, signal } from "@preact/signals";
import type { Group, RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import { explain, isCancelled, type Trouble } from "../lib/errors";
import { type Following, follow } from "../lib/follow";
import { driverOf, findAt, remember } from "../lib/members";
import { seesAll } from "../lib/scope";
import { client } from "../lib/transport";
import { type Capture, captureSoFar, NO_CAPTURE, trajectory } from "../rollout/records";

export interface GroupModel {
  readonly id: string;
  readonly group: ReadonlySignal<Group | undefined>;
  /** In the order of their index. */
  readonly rollouts: ReadonlySignal<readonly RolloutSummary[]>;
  readonly isUnknown: ReadonlySignal<boolean>;
  readonly following: Following;
  stop(): void;
}

/** A group has at most this many rollouts, spares included. */
const MOST_ROLLOUTS = 512;

/** Follows a group until `stop`. */
export function followGroup(id: string): GroupModel {
  const group = signal<Group | undefined>(undefined);
  const known = signal<ReadonlyMap<string, RolloutSummary>>(new Map());
  let isFresh = false;
  const following = follow(
    "follow this group",
    async function* (signal) {
      const driver = await findAt(id, async (driver) => {
        group.value = (await client(RolloutService, driver).getGroup({ groupId: id }, { signal })).group;
        return driver;
      });
      remember(id, undefined, driver);
      for (const rolloutId of group.peek()?.rolloutIds ?? []) remember(rolloutId, undefined, driver);
      isFresh = true;
      const filter = { groupId: id, allNamespaces: await seesAll("driver") };
      yield* client(RolloutService, driver).watchRollouts({ filter, endedLimit: MOST_ROLLOUTS }, { signal, timeoutMs: 0 });
    },
    (message) => {
      const next = new Map(isFresh ? [] : known.peek());
      isFresh = false;
      for (const rollout of message.rollouts) {
        next.set(rollout.rolloutId, rollout);
        remember(rollout.rolloutId, rollout.home, driverOf(id));
      }
      for (const gone of message.goneRolloutIds) next.delete(gone);
      known.value = next;
    },
  );
  return {
    id,
    group,
    rollouts: computed(() => [...known.value.values()].sort((a, b) => a.index - b.index)),
    isUnknown: computed(() => {
      const health = following.health.value;
      return health.kind === "broken" && health.trouble.code === Code.NotFound;
    }),
    following,
    stop: following.stop,
  };
}

export interface Reading {
  readonly capture: Capture;
  readonly trouble: Trouble | undefined;
  readonly isReading: boolean;
}

/** The calls of a rollout as they stand: of one that has ended all, of one that runs what there is now. */
export async function readCapture(rolloutId: string, isEnded: boolean, abort: AbortSignal): Promise<Reading | undefined> {
  try {
    const capture = await (isEnded ? trajectory(rolloutId, abort) : captureSoFar(rolloutId, NO_CAPTURE, abort));
    return { capture, trouble: undefined, isReading: false };
  } catch (error) {
    if (isCancelled(error)) return undefined;
    const trouble = explain(error, "read its calls");
    const isAbsent = trouble.reason === "TRAJECTORY_ABSENT" || (trouble.code === Code.NotFound && !isEnded);
    return { capture: NO_CAPTURE, trouble: isAbsent ? undefined : trouble, isReading: false };
  }
}
