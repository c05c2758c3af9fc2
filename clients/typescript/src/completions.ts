/** What a trainer answers a call with: every sampled token, the stop token included. */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { InvalidArgument } from "./errors.js";
import { FinishReasonSchema, Role, type SamplingSchema } from "./gen/penstock/chat/v1/chat_pb.js";
import {
  type Completion as CompletionMessage,
  CompletionSchema,
  LogprobsModeSchema,
  type TokenSpan,
} from "./gen/penstock/chat/v1/completion_pb.js";
import { bytesOf, logprobs, number, tokenIds } from "./wire.js";

/** How to sample; what is absent is left to the engine that samples. */
export type Sampling = MessageInitShape<typeof SamplingSchema>;

export interface CompletionOptions {
  /** The weights that sampled all of it; absent = unknown. */
  readonly policyVersion?: number;
  readonly finishReason?: "stop" | "length" | "tool_calls" | "abort" | "content_filter";
  /** What a logprob is the logarithm of: the distribution that was sampled from, or the model's own. Default: processed. */
  readonly logprobsMode?: "raw" | "processed" | "scripted";
  readonly engine?: string;
  readonly engineVersion?: string;
  readonly samplingUsed?: Sampling;
  /** The likeliest tokens at each position, for a trainer that learns from them. */
  readonly top?: TopLogprobs;
}

/** Alternatives, row after row: `count` (at most 20) for each token, the likeliest first; a row with fewer ends with id -1 and -Infinity. */
export interface TopLogprobs {
  readonly count: number;
  readonly tokenIds: Int32Array;
  readonly logprobs: Float32Array;
}

/** The alternatives of a span or a sample; undefined where there are none or they were left out. */
export function topOf(message: Pick<TokenSpan, "topCount" | "topTokenIds" | "topLogprobs">): TopLogprobs | undefined {
  const { topCount: count, topTokenIds, topLogprobs } = message;
  return topTokenIds.length === 0
    ? undefined
    : { count, tokenIds: tokenIds(topTokenIds), logprobs: logprobs(topLogprobs) };
}

/** A completion; from an inference service, or made by `ofTokens`, or by `ofText` for what shall be shown and never trained on. */
export class Completion {
  private constructor(
    /** As it travels. */
    readonly message: CompletionMessage,
  ) {}

  /**
   * From a trainer's own engine.
   *
   * @param ids whole numbers in [0, 2^31).
   * @param probabilities natural logarithms, one for each token; absent where the engine gives none. The gate refuses what is not
   *   finite or above 0.
   * @throws InvalidArgument TOKEN_IDS, COMPLETION_SHAPE.
   */
  static ofTokens(
    ids: Int32Array | readonly number[],
    probabilities?: Float32Array | readonly number[],
    options: CompletionOptions = {},
  ): Completion {
    if (!(ids instanceof Int32Array) && ids.some((id) => !Number.isInteger(id) || id < 0 || id >= 2 ** 31)) {
      throw new InvalidArgument("A token id is a whole number in [0, 2^31)", { reason: "TOKEN_IDS" });
    }
    if (probabilities !== undefined && probabilities.length !== ids.length) {
      const message = `token ids and logprobs are of one length, not ${ids.length} and ${probabilities.length}`;
      throw new InvalidArgument(message, { reason: "COMPLETION_SHAPE" });
    }
    const { policyVersion, top } = options;
    if (top !== undefined && [top.tokenIds, top.logprobs].some((rows) => rows.length !== top.count * ids.length)) {
      const message = `alternatives are ${top.count} for each of ${ids.length} tokens, not ${top.tokenIds.length} ids and ${top.logprobs.length} logprobs`;
      throw new InvalidArgument(message, { reason: "COMPLETION_SHAPE" });
    }
    const versions =
      policyVersion === undefined || ids.length === 0
        ? []
        : [{ policyVersion: BigInt(policyVersion), start: 0, end: ids.length }];
    const none = probabilities === undefined && top === undefined;
    const mode = none ? "unspecified" : (options.logprobsMode ?? "processed");
    return new Completion(
      create(CompletionSchema, {
        span: {
          tokenIds: bytesOf(Int32Array.from(ids)),
          count: ids.length,
          logprobs: probabilities === undefined ? new Uint8Array() : bytesOf(Float32Array.from(probabilities)),
          logprobsMode: number(LogprobsModeSchema, mode),
          versions,
          ...(top && {
            topCount: top.count,
            topTokenIds: bytesOf(top.tokenIds),
            topLogprobs: bytesOf(top.logprobs),
          }),
        },
        finishReason: number(FinishReasonSchema, options.finishReason ?? "stop"),
        engine: options.engine ?? "trainer",
        engineVersion: options.engineVersion ?? "",
        samplingUsed: options.samplingUsed,
      }),
    );
  }

  /** As an inference service answered. */
  static ofMessage(message: CompletionMessage): Completion {
    return new Completion(message);
  }

  /** Without tokens: shown to the agent, recorded as injected, never trained on. */
  static ofText(text: string, options: Pick<CompletionOptions, "engine"> = {}): Completion {
    return new Completion(
      create(CompletionSchema, {
        message: { role: Role.ASSISTANT, parts: [{ part: { case: "text", value: { text } } }] },
        finishReason: number(FinishReasonSchema, "stop"),
        engine: options.engine ?? "trainer",
      }),
    );
  }
  /** Empty where there are none. */
  get tokenIds(): Int32Array {
    return tokenIds(this.message.span?.tokenIds ?? new Uint8Array());
  }

  /** Absent where the engine gave none. */
  get logprobs(): Float32Array | undefined {
    const data = this.message.span?.logprobs;
    return data === undefined || data.length === 0 ? undefined : logprobs(data);
  }

  /** Absent where the engine gave none. */
  get top(): TopLogprobs | undefined {
    const { span } = this.message;
    return span && topOf(span);
  }
}
