// Streams of rows, for as long as somebody shows them: one of each driver for each set of rollouts, however many parts look at it.
import { computed, signal } from "@preact/signals";
import { create } from "@bufbuild/protobuf";
import { RolloutService, WatchRolloutsRequestSchema } from "@gen/penstock/driver/v1/rollout_service_pb";

import { follow, type Following } from "../lib/follow";
import { driverNames, remember } from "../lib/members";
import { seesAll } from "../lib/scope";
import { client } from "../lib/transport";
import { oneLine } from "../rollout/safe";
import { Board, listed, type Row } from "./board";

/** Of those that have ended, this many of each driver are shown. */
export const ENDED_SHOWN = 2000;
/** The most that a driver sends. */
export const MOST_ENDED = 10_000;
/** A browser has six connections to one address, and a stream takes one: so many drivers are followed at once. */
export const MOST_DRIVERS = 4;
const LOOK_AGAIN_MS = 5000;
/** Seconds between two messages of a stream of up to 10,000 rows, over which curves are computed each time. */
const LARGE_INTERVAL_S = 3n;

interface Source {
  readonly board: Board;
  following: Following | null;
  /** Rows outlive the stream that sent them, while another page is shown. */
  heardAt: number | null;
}

/** The names of all drivers; [""] = one, that of the connection. Empty until it is known. */
export const drivers = signal<readonly string[]>([]);
/** The driver that is asked for by name; empty = the first ones. */
export const wanted = signal("");

/** The drivers that are followed. */
export const followed = computed<readonly string[]>(() =>
  drivers.value.includes(wanted.value) ? [wanted.value] : drivers.value.slice(0, MOST_DRIVERS),
);

let lookers = 0;
let looking: ReturnType<typeof setTimeout> | undefined;

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
  clearTimeout(looking);
  if (lookers) looking = setTimeout(() => void look(), LOOK_AGAIN_MS);
}

function isEqual(one: readonly string[], other: readonly string[]): boolean {
  return one.length === other.length && one.every((name, index) => name === other[index]);
}

/** The rows of some rollouts, of all drivers that are followed. */
export class Feed {
  private readonly sources = new Map<string, Source>();
  private readonly version = signal(0);
  private users = 0;
  private unwatch: (() => void) | undefined;

  /**
   * @param endedLimit of those that have ended, so many of each driver: the newest.
   * @param of only those of this run, or of this task; without either, all.
   */
  constructor(
    private readonly endedLimit: number,
    private readonly of: { readonly run?: string; readonly task?: string } = {},
  ) {}

  /** How the streams are, each with the name of its driver. */
  readonly followings = signal<readonly { readonly driver: string; readonly following: Following }[]>([]);

  /** All rows, newest first. */
  readonly rows = computed<readonly Row[]>(() => {
    this.version.value;
    return listed([...this.sources.values()].map(({ board }) => board));
  });

  /** Whether what there was at the beginning has come, of every driver that answers. */
  readonly complete = computed(() => {
    this.version.value;
    const known = [...this.sources.values()];
    return known.length > 0 && known.some(({ board }) => board.complete) && known.every(({ board, following }) => board.complete || following?.health.value.kind === "broken");
  });

  /** Whether a driver may have more that have ended than it was asked for. */
  readonly isFull = computed(() => {
    this.version.value;
    return [...this.sources.values()].some(({ board }) => board.endedCount >= this.endedLimit);
  });

  readonly isBroken = computed(() => this.followings.value.some(({ following }) => following.health.value.kind === "broken"));

  /** Begins to follow, and gives what ends it. */
  readonly watch = (): (() => void) => {
    this.users += 1;
    if (this.users === 1) {
      this.unwatch = followed.subscribe((names) => this.apply(names));
      lookers += 1;
      void look();
    }
    return () => {
      this.users -= 1;
      if (this.users) return;
      lookers -= 1;
      if (!lookers) clearTimeout(looking);
      this.unwatch?.();
      for (const source of this.sources.values()) {
        source.following?.stop();
        source.following = null;
      }
      this.followings.value = [];
    };
  };

  /** Follows these drivers and no others. */
  private apply(names: readonly string[]): void {
    for (const [name, source] of this.sources) {
      if (names.includes(name)) continue;
      source.following?.stop();
      this.sources.delete(name);
    }
    for (const name of names) {
      const source = this.sources.get(name) ?? { board: new Board(this.endedLimit), following: null, heardAt: null };
      this.sources.set(name, source);
      source.following ??= this.start(name, source);
    }
    this.followings.value = [...this.sources].flatMap(([driver, { following }]) => (following ? [{ driver, following }] : []));
    this.version.value += 1;
  }

  private start(name: string, source: Source): Following {
    const { endedLimit } = this;
    const { run, task } = this.of;
    const what = ["watch the rollouts", run && `of run ${run}`, task && `of task ${oneLine(task, 80)}`].filter(Boolean).join(" ");
    return follow(
      name ? `${what} of driver ${name}` : what,
      async function* (signal) {
        const allNamespaces = await seesAll("driver");
        const request = create(WatchRolloutsRequestSchema, {
          endedLimit,
          filter: { allNamespaces, ...(run ? { runId: run } : {}), ...(task ? { taskId: task } : {}) },
          ...(endedLimit > ENDED_SHOWN ? { interval: { seconds: LARGE_INTERVAL_S } } : {}),
        });
        source.board.begin();
        yield* client(RolloutService, name).watchRollouts(request, { signal, timeoutMs: 0 });
      },
      (message) => {
        source.heardAt = Date.now();
        for (const { rolloutId, groupId, home } of message.rollouts) {
          remember(rolloutId, home, name);
          if (groupId) remember(groupId, undefined, name);
        }
        if (source.board.apply(message)) this.version.value += 1;
      },
      true,
      source.heardAt,
    );
  }
}

/** All running rollouts and the newest that have ended: what the pages share that show no run of their own. */
export const newest = new Feed(ENDED_SHOWN);
