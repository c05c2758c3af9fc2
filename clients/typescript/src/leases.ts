/**
 * The calls that a session holds, and the results that are under way. No stream: `gate/streams.ts` moves the frames.
 *
 * - A call is handed out once, also when it is leased to this session anew; its result goes out under the newest lease.
 * - A result stays until the gate accepted or rejected it; after a break every such result is sent again, which the gate takes as the
 *   repeat that it is.
 */

import { create, toBinary } from "@bufbuild/protobuf";
import { ModelCall, unlessAborted } from "./calls.js";
import {
  AlreadyDelivered,
  CallEnded,
  type ErrorFacts,
  InvalidCompletion,
  NotLeased,
  type PenstockError,
  ResultRejected,
  StalePolicy,
  UnknownCall,
  type Violation,
} from "./errors.js";
import {
  type CallResult,
  CallResultSchema,
  type ModelCall as ModelCallMessage,
  ResultRejected_Reason as Reason,
  type ResultRejected as RejectedMessage,
  ResultRejected_ReasonSchema,
  type Results,
  ResultsSchema,
} from "./gen/penstock/interception/v1/intercept_service_pb.js";
import { word } from "./wire.js";

/** Largest result, as the protocol bounds a frame. */
export const MAX_RESULT_BYTES = 32 * 1024 * 1024;
const FRAME_BYTES = 8 * 1024 * 1024;

type RejectedClass = new (message: string, facts: ErrorFacts) => ResultRejected;

const REJECTIONS: Readonly<Partial<Record<Reason, RejectedClass>>> = {
  [Reason.UNKNOWN_CALL]: UnknownCall,
  [Reason.ALREADY_DELIVERED]: AlreadyDelivered,
  [Reason.CALL_ENDED]: CallEnded,
  [Reason.NOT_LEASED]: NotLeased,
  [Reason.INVALID]: InvalidCompletion,
  [Reason.STALE_POLICY]: StalePolicy,
};

interface Underway {
  readonly result: CallResult;
  readonly bytes: number;
  readonly accepted: PromiseWithResolvers<void>;
}

interface Held {
  readonly call: ModelCall;
  leaseId: string;
  answer: Underway | undefined;
}

/** The calls of a session that nobody took yet, of all gates. */
export class Inbox {
  readonly #calls: ModelCall[] = [];
  #waiting: PromiseWithResolvers<void> | undefined;
  #finished = false;

  /** Adds a call. */
  put(call: ModelCall): void {
    this.#calls.push(call);
    this.#notify();
  }

  /** The oldest call that nobody took; waits for one. Undefined = there will be no more. */
  async nextCall(signal?: AbortSignal): Promise<ModelCall | undefined> {
    for (;;) {
      signal?.throwIfAborted();
      const call = this.#calls.shift();
      if (call !== undefined) {
        if (!call.ended) {
          return call;
        }
        continue;
      }
      if (this.#finished) {
        return undefined;
      }
      this.#waiting ??= Promise.withResolvers<void>();
      const { promise } = this.#waiting;
      await (signal === undefined ? promise : unlessAborted(promise, signal));
    }
  }

  /** No more calls are handed out than have come. */
  finish(): void {
    this.#finished = true;
    this.#notify();
  }

  #notify(): void {
    this.#waiting?.resolve();
    this.#waiting = undefined;
  }
}

/** The book of a session at one gate. `wake` is called whenever there is something to send; new calls go to `inbox`. */
export class Leases {
  readonly #wake: () => void;
  readonly #inbox: Inbox;
  readonly #held = new Map<string, Held>();
  readonly #unsent = new Set<string>();
  #over: PenstockError | undefined;

  constructor(wake: () => void, inbox: Inbox) {
    this.#wake = wake;
    this.#inbox = inbox;
  }

  /** How many calls are here and not over. */
  get size(): number {
    return this.#held.size;
  }

  get callIds(): string[] {
    return [...this.#held.keys()];
  }

  has(callId: string): boolean {
    return this.#held.has(callId);
  }

  /** Puts a result under way; fulfilled when the gate accepted it. */
  async answer(result: CallResult): Promise<void> {
    if (this.#over !== undefined) {
      throw this.#over;
    }
    const held = this.#held.get(result.callId);
    if (held === undefined) {
      throw new CallEnded(`Call ${result.callId} needs no answer any more`, { reason: "CALL_ENDED" });
    }
    if (held.answer !== undefined) {
      throw new AlreadyDelivered(`Call ${result.callId} is being answered already`, { reason: "ANSWER_UNDER_WAY" });
    }
    result.leaseId = held.leaseId;
    const bytes = sizeOf(result);
    if (bytes > MAX_RESULT_BYTES) {
      throw new InvalidCompletion(`A result must have at most ${MAX_RESULT_BYTES} bytes`, { reason: "RESULT_TOO_LARGE" });
    }
    held.answer = { result, bytes, accepted: Promise.withResolvers<void>() };
    this.#send(held);
    await held.answer.accepted.promise;
  }

  // For the stream.

  /** The gate leased a call: a new one is handed out, one that is held gets its new lease. */
  leased(message: ModelCallMessage): void {
    const held = this.#held.get(message.callId);
    if (held === undefined) {
      const call = new ModelCall(message, (result) => this.answer(result));
      this.#held.set(message.callId, { call, leaseId: message.leaseId, answer: undefined });
      this.#inbox.put(call);
      return;
    }
    held.leaseId = message.leaseId;
    if (held.answer !== undefined) {
      held.answer.result.leaseId = message.leaseId;
      this.#send(held);
    }
  }

  /** A result is on the gate's disk. */
  accepted(callId: string): void {
    const held = this.#forget(callId);
    held?.call.end("ANSWERED");
    held?.answer?.accepted.resolve();
  }

  /** A result was not taken; the call may be answered again where it is still leased. */
  rejected(message: RejectedMessage): void {
    const held = this.#held.get(message.callId);
    if (held === undefined) {
      return;
    }
    const error = rejection(message);
    const { answer } = held;
    held.answer = undefined;
    this.#unsent.delete(message.callId);
    if (!error.retryable || held.call.ended) {
      this.#forget(message.callId);
      held.call.end(error.reason);
    }
    answer?.accepted.reject(error);
  }

  /** A call needs no answer any more. An answer that is under way gets its own verdict from the gate. */
  cancelled(callId: string, reason: string): void {
    const held = this.#held.get(callId);
    held?.call.end(reason);
    if (held !== undefined && held.answer === undefined) {
      this.#forget(callId);
    }
  }

  /** Rollouts were closed. */
  closed(rolloutIds: ReadonlySet<string>): void {
    for (const [callId, { call }] of this.#held) {
      if (rolloutIds.has(call.rolloutId)) {
        this.cancelled(callId, "ROLLOUT_CLOSED");
      }
    }
  }

  /**
   * A new stream stands: what was not acknowledged is sent again.
   *
   * @param kept calls that are still leased to this session; undefined = the gate forgot the session, and leases them anew.
   */
  takenUp(kept: ReadonlySet<string> | undefined): void {
    this.#unsent.clear();
    for (const [callId, held] of this.#held) {
      if (held.answer !== undefined) {
        this.#send(held);
      } else if (kept !== undefined && !kept.has(callId)) {
        this.cancelled(callId, "LEASE_LOST");
      }
    }
  }

  /** Results that wait to be sent, as many as there are up to a bound in bytes; undefined = there are none. */
  nextResults(): Results | undefined {
    const results: CallResult[] = [];
    let size = 0;
    for (const callId of this.#unsent) {
      const answer = this.#held.get(callId)?.answer;
      if (answer === undefined) {
        continue;
      }
      size += answer.bytes;
      if (results.length > 0 && size > FRAME_BYTES) {
        break;
      }
      this.#unsent.delete(callId);
      results.push(answer.result);
    }
    return results.length > 0 ? create(ResultsSchema, { results }) : undefined;
  }

  /** Nothing comes or goes any more: every waiter gets the error. */
  end(error: PenstockError): void {
    this.#over = error;
    const held = [...this.#held.values()];
    this.#held.clear();
    this.#unsent.clear();
    for (const { call, answer } of held) {
      call.end("SESSION_ENDED");
      answer?.accepted.reject(error);
    }
  }

  #send(held: Held): void {
    this.#unsent.add(held.call.callId);
    this.#wake();
  }

  #forget(callId: string): Held | undefined {
    const held = this.#held.get(callId);
    this.#held.delete(callId);
    this.#unsent.delete(callId);
    return held;
  }
}

/**
 * Bytes of a result as it travels. Throws with InvalidCompletion what has no form on the wire: the stream would end with
 * it, and take the other results along.
 */
export function sizeOf(result: CallResult): number {
  try {
    return toBinary(CallResultSchema, result).length;
  } catch (cause) {
    throw new InvalidCompletion(`The result cannot be sent: ${String(cause)}`, { reason: "RESULT_NOT_SENDABLE", cause });
  }
}

/** Why the gate did not take a result. */
export function rejection(message: RejectedMessage): ResultRejected {
  const reason = word(ResultRejected_ReasonSchema, message.reason).toUpperCase();
  const text = [message.message || `The gate refused the result: ${reason}`, ...message.violations].join("; ");
  return new (REJECTIONS[message.reason] ?? ResultRejected)(text, {
    reason,
    violations: message.violations.map(violation),
  });
}

/** `completion.span: must have tokens`, taken apart. */
function violation(text: string): Violation {
  const colon = text.indexOf(": ");
  return colon < 0
    ? { field: "completion", description: text }
    : { field: text.slice(0, colon), description: text.slice(colon + 2) };
}
