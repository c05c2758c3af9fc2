/**
 * What a session wants of the flow of its calls, and what it asked of the gate and is not answered yet.
 *
 * The gate answers in the order in which it was asked, and says once more that calls flow when a pause runs out. So an answer
 * belongs to the oldest question if it is of its kind, and what is wanted ends only when nothing is asked any more.
 *
 * A gate that restarts forgets a pause, even of a session that it resumes. So each new stream asks for it again, for what is left
 * of it.
 */

import type { Frame } from "./conversations.js";
import type { PenstockError } from "./errors.js";
import { duration } from "./wire.js";

/** Milliseconds of a pause that is over and still has to be answered. */
const LEAST_MS = 1;
/** Milliseconds of a pause without a duration. */
export const PAUSE_MS = 600_000;

interface Wish {
  readonly reason: string;
  readonly maxDurationMs: number | undefined;
}

interface Asked {
  /** Undefined = that calls flow. */
  readonly wish: Wish | undefined;
  /** Of the calls that were open; 0 where they flow. */
  readonly answer: PromiseWithResolvers<number>;
}

/** Pauses and resumes of one session. */
export class Pauses {
  readonly #send: (frame: Frame) => void;
  /** With when it ends, on the clock of `performance`. */
  #wanted: { readonly reason: string; readonly until: number } | undefined;
  readonly #asked: Asked[] = [];
  /** Whether the newest question is of a pause that began without this gate: nobody waits for its answer. */
  #hasBegun = false;
  /** Whether the session is paused and this gate does not know it yet: calls that it leases are put back. */
  isUnconfirmed = false;

  /** @param send takes a frame for the gate. */
  constructor(send: (frame: Frame) => void) {
    this.#send = send;
  }

  /** Fulfilled with the calls that were open when the gate began to hold the others. */
  async pause(reason: string, maxDurationMs: number | undefined): Promise<number> {
    this.adopt(reason, maxDurationMs ?? PAUSE_MS);
    return this.#ask({ reason, maxDurationMs });
  }

  /** Fulfilled when calls flow. */
  async resume(): Promise<void> {
    this.#wanted = undefined;
    await this.#ask(undefined);
  }

  /**
   * What was asked and is not answered: each stream asks it again. A pause that began without this gate is asked for what is left of
   * it. One that is over is asked too, for a moment: the gate answers in order.
   */
  get unanswered(): Frame[] {
    const wishes = this.#asked.map(({ wish }) => wish);
    if (wishes.length > 0 && this.#hasBegun && this.#wanted !== undefined) {
      const { reason, until } = this.#wanted;
      wishes[wishes.length - 1] = { reason, maxDurationMs: Math.max(Math.ceil(until - performance.now()), LEAST_MS) };
    }
    return wishes.map(frameOf);
  }

  /** A pause of the session, of which so much is left, that this gate gets with its next stream. */
  adopt(reason: string, leftMs: number): void {
    this.#wanted = { reason, until: performance.now() + leftMs };
  }

  /** Asks a new stream for what is left of the pause: the gate may have forgotten it. A question that is open decides instead. */
  beganStream(): void {
    if (this.#wanted === undefined) {
      return;
    }
    if (this.#asked.length > 0) {
      this.isUnconfirmed = true; // an older pause may be in force, which this question was to lengthen
      return;
    }
    const left = this.#wanted.until - performance.now();
    this.isUnconfirmed = left > 0;
    if (this.isUnconfirmed) {
      this.#send(frameOf({ reason: this.#wanted.reason, maxDurationMs: Math.ceil(left) }));
    } else {
      this.#wanted = undefined;
    }
  }

  /** The session's pause has begun, and did not wait for this gate, which could not be reached. */
  beganWithoutIt(): void {
    if (this.#asked.length > 0 && this.#wanted !== undefined) {
      this.isUnconfirmed = true;
      this.#hasBegun = true;
    }
  }

  /** The gate says that a pause is in force. */
  paused(openCalls: number): void {
    this.isUnconfirmed = false;
    if (this.#asked[0]?.wish !== undefined) {
      this.#asked.shift()?.answer.resolve(openCalls);
    }
  }

  /** The gate says that calls flow: it was asked to, or a pause ran out. */
  resumed(): void {
    this.isUnconfirmed = false;
    const [oldest] = this.#asked;
    if (oldest !== undefined && oldest.wish === undefined) {
      this.#asked.shift();
      oldest.answer.resolve(0);
    }
    if (this.#asked.length === 0) {
      this.#wanted = undefined;
    }
  }

  /** Nothing will be answered any more. */
  end(error: PenstockError): void {
    for (const { answer } of this.#asked.splice(0)) {
      answer.reject(error);
    }
  }

  /** Joins the question that asked the same last: only the newest question says what holds in the end. */
  #ask(wish: Wish | undefined): Promise<number> {
    this.#hasBegun = false;
    const newest = this.#asked.at(-1);
    if (newest !== undefined && same(newest.wish, wish)) {
      return newest.answer.promise;
    }
    const answer = Promise.withResolvers<number>();
    this.#asked.push({ wish, answer });
    this.#send(frameOf(wish));
    return answer.promise;
  }
}

function same(one: Wish | undefined, other: Wish | undefined): boolean {
  return one?.reason === other?.reason && one?.maxDurationMs === other?.maxDurationMs;
}

function frameOf(wish: Wish | undefined): Frame {
  return wish === undefined
    ? { case: "resume", value: {} }
    : { case: "pause", value: { reason: wish.reason, maxDuration: duration(wish.maxDurationMs) } };
}
