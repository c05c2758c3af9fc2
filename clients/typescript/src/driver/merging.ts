/** Lists and watches of several drivers as one. What a driver that is away has is never left out without a word. */

import type { Timestamp } from "@bufbuild/protobuf/wkt";
import { isAway } from "../cluster.js";
import { type PenstockError, Unavailable } from "../errors.js";
import { Backoff, pause } from "../rpc.js";
import type { RolloutChanges } from "./changes.js";

/** How often a watch looks for new drivers. */
const LOOK_AGAIN_MS = 2000;
/** Most messages of all drivers that wait for the caller. */
const MOST_WAITING = 64;

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

interface Message {
  readonly address: string;
  readonly changes?: RolloutChanges;
  readonly error?: unknown;
}

/**
 * The changes of all drivers, those that come later included. A driver that goes away is watched again, and named in `away`
 * meanwhile. Rejects with Unavailable where the only driver, or every one, went away.
 */
export async function* changesOfAll(
  drivers: (signal: AbortSignal) => Promise<readonly Watched[]>,
  signal?: AbortSignal,
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
      }
    }
  };
  const look = async () => {
    while (!either.aborted) {
      await pause(LOOK_AGAIN_MS, either).catch(() => {}); // the loop looks at `either`
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
      if (!names.has(address)) {
        continue; // it is no driver any more
      }
      if (changes === undefined) {
        broken.set(address, error);
        if (!isAway(error) || broken.size === names.size) {
          throw error;
        }
      } else {
        broken.delete(address);
        if (changes.complete) {
          complete.add(address);
        }
      }
      yield {
        rollouts: changes?.rollouts ?? [],
        gone: changes?.gone ?? [],
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
