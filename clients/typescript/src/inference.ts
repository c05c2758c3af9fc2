/** The inference service: tokens in, tokens and logprobs out. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Completion, type Sampling } from "./completions.js";
import { Internal } from "./errors.js";
import {
  type ChatPromptSchema,
  type GetInfoResponse,
  InferenceService,
} from "./gen/penstock/inference/v1/inference_service_pb.js";
import type { Abortable } from "./handles.js";
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

/** A conversation, rendered by the model's own template. */
export type Prompt = MessageInitShape<typeof ChatPromptSchema>;

/** `ps.inference`. */
export class Inference extends Weights {
  constructor(service: Service) {
    super(service, service.client(InferenceService));
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
}

function isList(prompt: readonly number[] | Prompt): prompt is readonly number[] {
  return Array.isArray(prompt);
}
