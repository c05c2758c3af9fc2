// The streams of rows, for as long as somebody shows them: one of each driver for the whole page, however many parts look at it.
import { computed, signal } from "@preact/signals";
import { create } from "@bufbuild/protobuf";
import { RolloutService, WatchRolloutsRequestSchema } from "@gen/penstock/driver/v1/rollout_service_pb";

import { follow, type Following } from "../lib/follow";
import { driverNames, remember } from "../lib/members";
import { seesAll } from "../lib/scope";
import { client } from "../lib/transport";
import { Board, listed, type Row } from "./board";

/** Of those that have ended, this many of each driver are shown. */
export const ENDED_SHOWN = 2000;
/** A browser has six connections to one address, and a stream takes one: so many drivers are followed at once. */
export const MOST_DRIVERS = 4;
const LOOK_AGAIN_MS = 5000;

interface Source {
  readonly board: Board;
  following: Following | null;
  /** Rows outlive the stream that told them, while another page is shown. */
  heardAt: number | null;
}

const sources = new Map<string, Source>();
const version = signal(0);

/** The names of all drivers; [""] = one, that of the connection. Empty until it is known. */
export const drivers = signal<readonly string[]>([]);
/** The driver that is asked for by name; empty = the first ones. */
export const wanted = signal("");

/** The drivers that are followed. */
export const followed = computed<readonly string[]>(() =>
  drivers.value.includes(wanted.value) ? [wanted.value] : drivers.value.slice(0, MOST_DRIVERS),
);

/** All rows, newest first. */
export const rows = computed<readonly Row[]>(() => {
  version.value;
  return listed([...sources.values()].map(({ board }) => board));
});

/** Whether what there was at the beginning has come, of every driver that answers. */
export const complete = computed(() => {
  version.value;
  const known = [...sources.values()];
  return known.length > 0 && known.some(({ board }) => board.complete) && known.every(({ board, following }) => board.complete || following?.health.value.kind === "broken");
});

/** How the streams are, each with the name of its driver. */
export const followings = signal<readonly { readonly driver: string; readonly following: Following }[]>([]);
let users = 0;
let looking: ReturnType<typeof setTimeout> | undefined;
let unwatch: (() => void) | undefined;

/** Begins to follow, and gives what ends it. */
export function watch(): () => void {
  users += 1;
  if (users === 1) {
    unwatch = followed.subscribe(apply);
    void look();
  }
  return () => {
    users -= 1;
    if (users) return;
    clearTimeout(looking);
    unwatch?.();
    for (const source of sources.values()) {
      source.following?.stop();
      source.following = null;
    }
    followings.value = [];
  };
}

/** Asks which drivers there are, again and again: they come and go. */
async function look(): Promise<void> {
  clearTimeout(looking);
  if (!document.hidden || !drivers.peek().length) {
    let names = drivers.peek();
    try {
      names = await driverNames();
    } catch {
      if (!names.length) names = [""]; // its own stream says what is wrong
    }
    if (!isEqual(names, drivers.peek())) drivers.value = names;
  }
  if (users) looking = setTimeout(() => void look(), LOOK_AGAIN_MS);
}

function isEqual(one: readonly string[], other: readonly string[]): boolean {
  return one.length === other.length && one.every((name, index) => name === other[index]);
}

/** Follows these drivers and no others. */
function apply(names: readonly string[]): void {
  for (const [name, source] of sources) {
    if (names.includes(name)) continue;
    source.following?.stop();
    sources.delete(name);
  }
  for (const name of names) {
    const source = sources.get(name) ?? { board: new Board(ENDED_SHOWN), following: null, heardAt: null };
    sources.set(name, source);
    source.following ??= start(name, source);
  }
  followings.value = [...sources].flatMap(([driver, { following }]) => (following ? [{ driver, following }] : []));
  version.value += 1;
}

function start(name: string, source: Source): Following {
  return follow(
    name ? `watch the rollouts of driver ${name}` : "watch the rollouts",
    async function* (signal) {
      const allNamespaces = await seesAll("driver");
      const request = create(WatchRolloutsRequestSchema, { endedLimit: ENDED_SHOWN, filter: { allNamespaces } });
      source.board.begin();
      yield* client(RolloutService, name).watchRollouts(request, { signal, timeoutMs: 0 });
    },
    (message) => {
      source.heardAt = Date.now();
      for (const { rolloutId, groupId, home } of message.rollouts) {
        remember(rolloutId, home, name);
        if (groupId) remember(groupId, undefined, name);
      }
      if (source.board.apply(message)) version.value += 1;
    },
    true,
    source.heardAt,
  );
}
