/** Sequences to score, and their scores: logprobs of given tokens, and of the likeliest ones at each position. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import { type TopLogprobs, topOf } from "../completions.js";
import { InvalidArgument, type PenstockError } from "../errors.js";
import type {
  ScoreFailure,
  ScoreRequestSchema,
  ScoreResponse,
} from "../gen/penstock/inference/v1/inference_service_pb.js";
import { ofCode } from "../statuses.js";
import { bytesOf, logprobs } from "../wire.js";

export interface ScoreOptions {
  /** A loaded adapter; absent = the base weights. */
  readonly adapter?: string;
  /** Of the distribution. Default 1. */
  readonly temperature?: number;
  /** Refuses unless exactly these weights score; absent = those that are in force. */
  readonly exactVersion?: number;
}

/** A sequence to score. */
export interface ToScore extends ScoreOptions {
  /** The whole sequence, at least 2 tokens. */
  readonly tokenIds: Int32Array | readonly number[];
  /** The first token that is scored, at least 1. Default 1. */
  readonly start?: number;
  /** How many of the likeliest tokens to give at each position, 0 to 20. Default 0. */
  readonly topLogprobs?: number;
}

/** Logprobs of the tokens from `ToScore.start` on. */
export interface Score {
  readonly logprobs: Float32Array;
  /** Of the weights that scored. */
  readonly policyVersion: number;
  /** The likeliest tokens at each position; absent = they were not asked for. */
  readonly top: TopLogprobs | undefined;
}

/** A sequence as it travels. Throws InvalidArgument TOKEN_IDS. */
export function scoreTo(sequence: ToScore): MessageInitShape<typeof ScoreRequestSchema> {
  const { tokenIds, start = 1, topLogprobs = 0, adapter = "", temperature, exactVersion } = sequence;
  if (!(tokenIds instanceof Int32Array) && tokenIds.some((id) => !Number.isInteger(id) || id < 0 || id >= 2 ** 31)) {
    throw new InvalidArgument("A token id is a whole number in [0, 2^31)", { reason: "TOKEN_IDS" });
  }
  return {
    tokenIds: bytesOf(Int32Array.from(tokenIds)),
    start,
    topLogprobs: topLogprobs || undefined,
    adapter,
    temperature,
    exactVersion: exactVersion === undefined ? undefined : BigInt(exactVersion),
  };
}

export function scoreFrom(message: ScoreResponse): Score {
  return { logprobs: logprobs(message.logprobs), policyVersion: Number(message.policyVersion), top: topOf(message) };
}

/** Why one sequence of a batch was not scored. */
export function failureFrom({ code, message, reason, violations }: ScoreFailure): PenstockError {
  const split = violations.map((text) => {
    const at = text.indexOf(": ");
    return at < 0 ? { field: text, description: "" } : { field: text.slice(0, at), description: text.slice(at + 2) };
  });
  return ofCode(code, message, { reason, violations: split });
}
