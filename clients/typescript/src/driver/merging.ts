/** Lists and watches of several drivers as one. What a driver that is away has is never left out without a word. */

import type { Timestamp } from "@bufbuild/protobuf/wkt";
import { isAway } from "../cluster.js";
import { type PenstockError, Unavailable } from "../errors.js";
import { Phase } from "../gen/penstock/driver/v1/rollout_pb.js";
import { Backoff, pause } from "../rpc.js";
import type { RolloutChanges } from "./changes.js";

/** How often a watch looks for new drivers; tests look more often. */
export const LOOKS = { againMs: 2000 };
/** Most messages of all drivers that wait for the caller. */
const MOST_WAITING = 64;
/** How many ended rollouts a driver sends at first, unless it is asked for another number. */
const ENDED = 1000;
/** Of how many ended rollouts of a driver the ids are remembered: the most that it sends at first. */
const MOST_ENDED = 10_000;
const SLACK = 1000;

/**
 * The items of several lists, each newest first, as one, newest first. A driver that is away rejects it after the items of all
 * others.
 */
export async function* newestFirst<T>(
  lists: readonly AsyncGenerator<T, void>[],
  created: (item: T) => Timestamp | undefined,
): AsyncGenerator<T, void> {
  let away: unknown;
  const heads = new Map<number, T>();
  const advance = async (at: number) => {
    heads.delete(at);
    try {
      const step = await lists[at]?.next();
      if (step !== undefined && !step.done) {
        heads.set(at, step.value);
      }
    } catch (error) {
      if (!isAway(error)) {
        throw error;
      }
      away ??= error;
    }
  };
  const time = (at: number) => created(heads.get(at) as T);
  try {
    await Promise.all(lists.keys().map(advance));
    while (heads.size > 0) {
      const newest = [...heads.keys()].sort((one, other) => order(time(other), time(one)) || one - other)[0] as number;
      yield heads.get(newest) as T;
      await advance(newest);
    }
  } finally {
    await Promise.all(lists.map((list) => list.return()));
  }
  if (away !== undefined) {
    throw away;
  }
}

/** Negative where the first is earlier. */
function order(one: Timestamp | undefined, other: Timestamp | undefined): number {
  return Number((one?.seconds ?? 0n) - (other?.seconds ?? 0n)) || (one?.nanos ?? 0) - (other?.nanos ?? 0);
}

/** The items of several lists, list by list. A driver that is away rejects it after the items of all others. */
export async function* oneAfterAnother<T>(lists: readonly AsyncGenerator<T, void>[]): AsyncGenerator<T, void> {
  let away: unknown;
  for (const list of lists) {
    try {
      yield* list;
    } catch (error) {
      if (!isAway(error)) {
        throw error;
      }
      away ??= error;
    }
  }
  if (away !== undefined) {
    throw away;
  }
}

/** A driver to watch: its address, which identifies it; its name, for people; and its changes. */
export interface Watched {
  readonly address: string;
  readonly name: string;
  changes(signal: AbortSignal): AsyncGenerator<RolloutChanges, void>;
}

/** Without `changes` and `error`: it is no driver any more. */
interface Message {
  readonly address: string;
  readonly changes?: RolloutChanges;
  readonly error?: unknown;
}

/**
 * The changes of all drivers, those that come later included. A driver that goes away is watched again, and named in `away`
 * meanwhile. `gone` names also what it has no more then, and all that was of one that is no driver any more. Rejects with
 * Unavailable where the only driver, or every one, went away.
 *
 * @param endedLimit how many ended rollouts each driver was asked for; absent = the driver's default.
 */
export async function* changesOfAll(
  drivers: (signal: AbortSignal) => Promise<readonly Watched[]>,
  signal?: AbortSignal,
  endedLimit = ENDED,
): AsyncGenerator<RolloutChanges, void> {
  const left = new AbortController();
  const either = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
  const waiting: Message[] = [];
  let arrived = Promise.withResolvers<void>();
  let taken = Promise.withResolvers<void>();
  const names = new Map<string, string>();
  const pumps = new Map<string, AbortController>();
  const running = new Set<Promise<void>>();
  const broken = new Map<string, unknown>();
  const complete = new Set<string>();
  const given = new Map<string, Given>();
  const givenBy = (address: string): Given => {
    const found = given.get(address) ?? new Given(endedLimit);
    given.set(address, found);
    return found;
  };
  // A driver that changed its address is a new one here.
  const nowhere = (ids: readonly string[]) => ids.filter((id) => ![...given.values()].some((other) => other.has(id)));

  const put = async (message: Message, ended: AbortSignal) => {
    while (waiting.length >= MOST_WAITING && !ended.aborted) {
      await taken.promise;
    }
    if (!ended.aborted) {
      waiting.push(message);
      arrived.resolve();
    }
  };
  const pump = async ({ address, name, changes }: Watched, ended: AbortSignal) => {
    const backoff = new Backoff();
    while (!ended.aborted) {
      let error: unknown = new Unavailable(`The driver ${name} ended the stream`, { reason: "STREAM_ENDED" });
      try {
        for await (const message of changes(ended)) {
          backoff.reset();
          await put({ address, changes: message }, ended);
        }
      } catch (failure) {
        error = failure;
      }
      await put({ address, error }, ended);
      await pause(backoff.next(error as PenstockError), ended).catch(() => {}); // the loop looks at `ended`
    }
  };
  const follow = (found: readonly Watched[]) => {
    for (const driver of found) {
      if (!pumps.has(driver.address)) {
        const own = new AbortController();
        names.set(driver.address, driver.name || driver.address);
        pumps.set(driver.address, own);
        const pumping = pump(driver, AbortSignal.any([own.signal, either])).finally(() => running.delete(pumping));
        running.add(pumping);
      }
    }
    for (const [address, own] of pumps) {
      if (!found.some((driver) => driver.address === address)) {
        own.abort();
        pumps.delete(address);
        names.delete(address);
        broken.delete(address);
        complete.delete(address);
        waiting.push({ address });
        arrived.resolve();
      }
    }
  };
  const look = async () => {
    while (!either.aborted) {
      await pause(LOOKS.againMs, either).catch(() => {}); // the loop looks at `either`
      if (!either.aborted) {
        await drivers(either).then(follow, () => {}); // a driver's own stream says more
      }
    }
  };

  follow(await drivers(either));
  const looking = look();
  const abort = () => {
    arrived.resolve();
    taken.resolve();
  };
  either.addEventListener("abort", abort);
  try {
    for (;;) {
      signal?.throwIfAborted();
      const message = waiting.shift();
      if (message === undefined) {
        arrived = Promise.withResolvers<void>();
        await arrived.promise;
        continue;
      }
      taken.resolve();
      taken = Promise.withResolvers<void>();
      const { address, changes, error } = message;
      let lost: readonly string[] = [];
      if (changes === undefined && error === undefined) {
        const had = given.get(address)?.ids ?? [];
        given.delete(address);
        lost = nowhere(had);
        if (lost.length === 0) {
          continue;
        }
      } else if (!names.has(address)) {
        continue; // it is no driver any more
      } else if (changes === undefined) {
        broken.set(address, error);
        givenBy(address).broke();
        if (!isAway(error) || broken.size === names.size) {
          throw error;
        }
      } else {
        broken.delete(address);
        if (changes.complete) {
          complete.add(address);
        }
        lost = nowhere(givenBy(address).taken(changes));
      }
      yield {
        rollouts: changes?.rollouts ?? [],
        gone: [...(changes?.gone ?? []), ...lost],
        complete: [...names.keys()].every((item) => complete.has(item) || broken.has(item)),
        away: [...broken.keys()].map((item) => names.get(item) ?? item).sort(),
      };
    }
  } finally {
    left.abort();
    abort();
    either.removeEventListener("abort", abort);
    await Promise.all([looking, ...running]);
  }
}

/** When a rollout was created, in seconds, if it has ended; undefined while it runs. */
type Ended = number | undefined;

/**
 * The rollouts that a driver's watch has given: what it has no more after a broken stream, it does not say itself. Invariant: it
 * holds the ids of running rollouts, and of no more than `MOST_ENDED + SLACK` ended ones.
 */
export class Given {
  readonly #endedLimit: number;
  /** Of this stream, and of those before it what this one has not sent. */
  #now = new Map<string, Ended>();
  #earlier = new Map<string, Ended>();
  #most = MOST_ENDED + SLACK;

  constructor(endedLimit: number = ENDED) {
    this.#endedLimit = endedLimit;
  }

  has(id: string): boolean {
    return this.#now.has(id) || this.#earlier.has(id);
  }

  get ids(): readonly string[] {
    return [...this.#now.keys(), ...this.#earlier.keys()];
  }

  /** The stream broke: the next one begins with what there is then. */
  broke(): void {
    this.#earlier = newest(new Map([...this.#earlier, ...this.#now]));
    this.#now = new Map();
  }

  /** Notes a message. @returns the rollouts that the driver had before the stream broke, and has no more. */
  taken({ rollouts, gone, complete }: Pick<RolloutChanges, "rollouts" | "gone" | "complete">): readonly string[] {
    for (const { rolloutId, phase, createTime } of rollouts) {
      this.#earlier.delete(rolloutId);
      const created = Number(createTime?.seconds ?? 0n) + (createTime?.nanos ?? 0) / 1e9;
      this.#now.set(rolloutId, phase === Phase.ENDED ? created : undefined);
    }
    for (const id of gone) {
      this.#earlier.delete(id);
      this.#now.delete(id);
    }
    const lost = complete && this.#earlier.size > 0 ? this.#lost() : [];
    if (this.#now.size > this.#most) {
      this.#now = newest(this.#now);
      this.#most = Math.max(MOST_ENDED, this.#now.size) + SLACK;
    }
    return lost;
  }

  /** The earlier ones that a whole snapshot would have; the others stay. */
  #lost(): readonly string[] {
    const ended = [...this.#now.values()].filter((created) => created !== undefined);
    // With as many ended ones as were asked for, older ones were left out.
    const since =
      ended.length < this.#endedLimit
        ? Number.NEGATIVE_INFINITY
        : ended.reduce((oldest, created) => Math.min(oldest, created), Number.POSITIVE_INFINITY);
    const lost: string[] = [];
    for (const [id, created] of this.#earlier) {
      // One that ran is in every snapshot while it runs. If it ended and was left out, it would seem to run for ever.
      if (created === undefined || created > since) {
        lost.push(id);
      } else {
        this.#now.set(id, created);
      }
    }
    this.#earlier = new Map();
    return lost;
  }
}

/** Leaves out the oldest ended ones. */
function newest(known: ReadonlyMap<string, Ended>): Map<string, Ended> {
  const ended = [...known].filter((item): item is [string, number] => item[1] !== undefined);
  const old = new Set(
    ended
      .sort(([, one], [, other]) => other - one)
      .slice(MOST_ENDED)
      .map(([id]) => id),
  );
  return new Map([...known].filter(([id]) => !old.has(id)));
}
