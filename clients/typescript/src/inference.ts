/** The inference service: tokens in, tokens and logprobs out. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Cluster } from "./cluster.js";
import { Completion, type Sampling } from "./completions.js";
import { Internal, PenstockError } from "./errors.js";
import {
  type ChatPromptSchema,
  type GetInfoResponse,
  InferenceService,
} from "./gen/penstock/inference/v1/inference_service_pb.js";
import type { Abortable } from "./handles.js";
import { failureFrom, type Score, type ScoreOptions, scoreFrom, scoreTo, type ToScore } from "./inference/scores.js";
import type { Service } from "./rpc.js";
import { Weights } from "./weights/weights.js";
import { bytesOf, tokenIds } from "./wire.js";

export interface GenerateOptions extends Abortable {
  readonly sampling?: Sampling | undefined;
  /** Requests of one session reuse its cache: a rollout's id. */
  readonly sessionId?: string;
  /** A loaded adapter; absent = the base weights. */
  readonly adapter?: string;
  /** Waits until at least these weights are in force. */
  readonly minVersion?: number;
  /** Refuses unless exactly these are. */
  readonly exactVersion?: number;
}

/** A sequence's position in its batch, with its score or its failure. */
export type Scored =
  | { readonly index: number; readonly score: Score; readonly failure: undefined }
  | { readonly index: number; readonly score: undefined; readonly failure: PenstockError };

const SCORE_MS = 300_000;

/** A conversation, rendered by the model's own template. */
export type Prompt = MessageInitShape<typeof ChatPromptSchema>;

/**
 * `ps.inference`.
 *
 * Where the gates have a list of engines, what changes an engine (weights, adapters, pauses) is done at all of them; questions and
 * generations go to the one at the connection's address.
 */
export class Inference extends Weights {
  constructor(service: Service, cluster: Cluster) {
    super(service, service.client(InferenceService), cluster);
  }

  /** What is served, what it can do, which weights are in force. */
  async info({ signal }: Abortable = {}): Promise<GetInfoResponse> {
    return this.service.call((options) => this.client.getInfo({}, options), { signal, repeatable: true });
  }

  /**
   * Samples one completion. Aborting it aborts the generation.
   *
   * With token ids, `thinking` and `thinkingBudgetTokens` of the sampling are left out, so that a call's own can be passed on:
   * the prompt says whether to think, and no engine has a limit of thoughts.
   */
  async generate(prompt: Int32Array | readonly number[] | Prompt, options: GenerateOptions = {}): Promise<Completion> {
    const { signal, sampling, sessionId = "", adapter = "", minVersion, exactVersion } = options;
    const ids = prompt instanceof Int32Array || isList(prompt);
    const request = {
      requestId: randomBytes(16).toString("hex"),
      sessionId,
      prompt: ids
        ? { case: "tokenIds" as const, value: bytesOf(Int32Array.from(prompt)) }
        : { case: "chat" as const, value: prompt },
      sampling: ids && sampling !== undefined ? { ...sampling, thinking: undefined, thinkingBudgetTokens: undefined } : sampling,
      adapter,
      version: {
        minVersion: minVersion === undefined ? undefined : BigInt(minVersion),
        exactVersion: exactVersion === undefined ? undefined : BigInt(exactVersion),
      },
    };
    for await (const { event } of this.service.stream((call) => this.client.generate(request, call), signal)) {
      if (event.case === "done" && event.value.completion !== undefined) {
        return Completion.ofMessage(event.value.completion);
      }
    }
    throw new Internal("The generation ended without its result", { reason: "STREAM_CUT" });
  }

  /** A conversation's tokens, by the model's template; with the start of the answer unless `generationPrompt` is false. */
  async render(prompt: Prompt, options: Abortable & { readonly generationPrompt?: boolean } = {}): Promise<Int32Array> {
    const request = { prompt, addGenerationPrompt: options.generationPrompt };
    const { signal } = options;
    const answer = await this.service.call((call) => this.client.render(request, call), { signal, repeatable: true });
    return tokenIds(answer.tokenIds);
  }

  /**
   * Logprobs of the tokens from `start` (at least 1) on. Rejects with FailedPrecondition POLICY_VERSION_UNAVAILABLE; InvalidArgument
   * TOKEN_IDS.
   *
   * @param tokenIds the whole sequence, at least 2 tokens.
   */
  async score(
    tokenIds: Int32Array | readonly number[],
    start: number,
    options: ScoreOptions & Abortable = {},
  ): Promise<Float32Array> {
    return (await this.scoreTop(tokenIds, start, 0, options)).logprobs;
  }

  /** As `score`, with so many of the likeliest tokens at each position, 0 to 20, and their logprobs. */
  async scoreTop(
    tokenIds: Int32Array | readonly number[],
    start: number,
    topLogprobs: number,
    { signal, ...options }: ScoreOptions & Abortable = {},
  ): Promise<Score> {
    const request = scoreTo({ ...options, tokenIds, start, topLogprobs });
    return scoreFrom(
      await this.service.call((call) => this.client.score(request, call), { signal, timeoutMs: SCORE_MS, repeatable: true }),
    );
  }

  /**
   * Scores several sequences in one call; the engine computes them together as far as it can. Rejects with the first failure of a
   * sequence: the rest is not scored then.
   *
   * @param sequences 1 to 1024, at most 64 MiB together.
   * @returns the scores in the order of their sequences.
   */
  async scoreBatch(sequences: readonly ToScore[], options: Abortable = {}): Promise<Score[]> {
    const found: Score[] = [];
    let count = 0;
    for await (const { index, score, failure } of this.scoreEach(sequences, options)) {
      if (failure !== undefined) {
        throw failure;
      }
      found[index] = score;
      count += 1;
    }
    if (count !== sequences.length) {
      throw new Internal(`The batch ended with ${count} of ${sequences.length} scores`, { reason: "STREAM_CUT" });
    }
    return found;
  }

  /** As `scoreBatch`, but gives each sequence's score, or its failure, as they are ready. */
  async *scoreEach(sequences: readonly ToScore[], { signal }: Abortable = {}): AsyncGenerator<Scored, void> {
    const request = { sequences: sequences.map(scoreTo) };
    for await (const { index, outcome } of this.service.stream((call) => this.client.scoreBatch(request, call), signal)) {
      if (outcome.case === "score") {
        yield { index, score: scoreFrom(outcome.value), failure: undefined };
      } else if (outcome.case === "failure") {
        yield { index, score: undefined, failure: failureFrom(outcome.value) };
      }
    }
  }
}

function isList(prompt: readonly number[] | Prompt): prompt is readonly number[] {
  return Array.isArray(prompt);
}
