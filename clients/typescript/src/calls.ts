/** A model call that waits for the trainer's answer. */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { Completion, Sampling } from "./completions.js";
import { AlreadyDelivered } from "./errors.js";
import type { Message, Sampling as SamplingMessage, Tool } from "./gen/penstock/chat/v1/chat_pb.js";
import {
  type CallResult,
  CallResultSchema,
  type ModelCall as ModelCallMessage,
} from "./gen/penstock/interception/v1/intercept_service_pb.js";
import { CallClassSchema, DialectSchema } from "./gen/penstock/trajectory/v1/trajectory_pb.js";
import { time, tokenIds, word } from "./wire.js";

/** Sends a result; fulfilled when it is accepted, rejects with a ResultRejected. */
export type Answer = (result: CallResult) => Promise<void>;

export interface AnswerOptions {
  /** Ends the waiting only: an answer that is on its way stays there. */
  readonly signal?: AbortSignal;
}

/** One model call of an agent, leased to this session until it is answered: `deliver`, `fail`, `delegate` or `release`. */
export class ModelCall {
  /** As it travelled: everything that has no name here. */
  readonly message: ModelCallMessage;
  readonly #answer: Answer;
  readonly #over = new AbortController();
  #promptTokenIds: Int32Array | undefined;
  #endReason = "";

  constructor(message: ModelCallMessage, answer: Answer) {
    this.message = message;
    this.#answer = answer;
  }

  get callId(): string {
    return this.message.callId;
  }
  get rolloutId(): string {
    return this.message.rolloutId;
  }
  get groupId(): string | undefined {
    return this.message.groupId;
  }
  /** The rollout's position in its group. */
  get groupIndex(): number | undefined {
    return this.message.groupIndex;
  }
  get runId(): string | undefined {
    return this.message.runId;
  }
  get taskId(): string | undefined {
    return this.message.taskId;
  }
  get labels(): Readonly<Record<string, string>> {
    return this.message.labels;
  }
  /** Position among the rollout's calls, from 0. */
  get index(): number {
    return this.message.index;
  }
  /** What it is for: main, sub_agent, compaction, title, probe or edit. */
  get callClass(): string {
    return word(CallClassSchema, this.message.callClass);
  }
  /** How the agent asked, for example chat_completions. */
  get dialect(): string {
    return word(DialectSchema, this.message.dialect);
  }
  /** The whole prompt: the conversation exactly as it was sampled, then the new messages. Empty where the source has no tokenizer. */
  get promptTokenIds(): Int32Array {
    this.#promptTokenIds ??= tokenIds(this.message.promptTokenIds);
    return this.#promptTokenIds;
  }
  /** Length of the prompt in tokens. */
  get promptCount(): number {
    return this.message.promptCount;
  }
  /** Tokens of the prompt that are the parent's prompt and completion: what an engine's cache has. */
  get sharedPrefixCount(): number {
    return this.message.sharedPrefixCount;
  }
  /** As the agent asked, maxTokens bounded by budgets and context. */
  get sampling(): SamplingMessage | undefined {
    return this.message.sampling;
  }
  /** The policy that shall answer, where the rollout has several models; empty = it has one. */
  get policyId(): string {
    return this.message.policyId;
  }
  /** The oldest weights that may answer, of that policy. */
  get minPolicyVersion(): number | undefined {
    return this.message.minPolicyVersion === undefined ? undefined : Number(this.message.minPolicyVersion);
  }
  /** The conversation, when the session asked for messages. */
  get messages(): readonly Message[] {
    return this.message.messages;
  }
  /** The tools offered, when the session asked for messages. */
  get tools(): readonly Tool[] {
    return this.message.tools;
  }
  /** 1 = never leased before. */
  get leaseAttempt(): number {
    return this.message.leaseAttempt;
  }
  /** When it expires unanswered. */
  get expireTime(): Date | undefined {
    return time(this.message.expireTime);
  }

  /** Aborted when the call needs no answer any more (answered, cancelled, lost): give it to the engine that generates. */
  get signal(): AbortSignal {
    return this.#over.signal;
  }
  /** Whether it needs no answer any more. */
  get ended(): boolean {
    return this.#over.signal.aborted;
  }
  /** Why: ANSWERED, CANCELLED, ROLLOUT_CLOSED, ...; empty while it does. */
  get endReason(): string {
    return this.#endReason;
  }

  /**
   * Answers the call. Fulfilled when the gate has it on disk: it will neither be lost nor asked for again.
   *
   * Rejects with InvalidCompletion or StalePolicy: the call may be answered again; AlreadyDelivered, CallEnded; SessionLost: the
   * connection did not come back.
   */
  async deliver(completion: Completion, options?: AnswerOptions): Promise<void> {
    await this.#send({ case: "completion", value: completion.message }, options);
  }

  /**
   * Says that the trainer cannot answer.
   *
   * @param reason stable UPPER_SNAKE, recorded; the agent does not see it.
   * @param about `message` for people, recorded; `retriable`: whether the agent is asked to try again.
   */
  async fail(
    reason: string,
    about: AnswerOptions & { readonly message?: string; readonly retriable?: boolean } = {},
  ): Promise<void> {
    const { message = "", retriable = false } = about;
    await this.#send({ case: "failure", value: { reason, message, retriable } }, about);
  }

  /** Lets the rollout's model source answer; `sampling` replaces, field by field, what the agent asked for. */
  async delegate(options: AnswerOptions & { readonly sampling?: Sampling } = {}): Promise<void> {
    const { sampling } = options;
    const value = sampling === undefined ? {} : { samplingOverride: sampling };
    await this.#send({ case: "delegation", value }, options);
  }

  /** Puts the call back into the queue, for another session. */
  async release(options?: AnswerOptions): Promise<void> {
    await this.#send({ case: "release", value: {} }, options);
  }

  /** For the session: no answer is needed any more. */
  end(reason: string): void {
    if (!this.ended) {
      this.#endReason = reason;
      this.#over.abort(reason);
    }
  }

  async #send(
    result: NonNullable<MessageInitShape<typeof CallResultSchema>["result"]>,
    options?: AnswerOptions,
  ): Promise<void> {
    const signal = options?.signal;
    signal?.throwIfAborted();
    if (this.#endReason === "ANSWERED") {
      throw new AlreadyDelivered(`Call ${this.callId} was answered already`, { reason: "ALREADY_DELIVERED" });
    }
    const accepted = this.#answer(create(CallResultSchema, { callId: this.callId, rolloutId: this.rolloutId, result }));
    await (signal === undefined ? accepted : unlessAborted(accepted, signal));
  }
}

/** What `promise` gives, or the signal's reason when it is aborted first. */
export async function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  signal.throwIfAborted();
  const aborted = Promise.withResolvers<never>();
  const abort = () => aborted.reject(signal.reason);
  signal.addEventListener("abort", abort, { once: true });
  try {
    return await Promise.race([promise, aborted.promise]);
  } finally {
    signal.removeEventListener("abort", abort);
  }
}
