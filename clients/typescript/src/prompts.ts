/** Prompts whose first tokens the gate left out, because it sent them on the same stream before. */

import { createHash } from "node:crypto";
import type { Client } from "@connectrpc/connect";
import { Unavailable } from "./errors.js";
import type { InterceptService, ModelCall } from "./gen/penstock/interception/v1/intercept_service_pb.js";
import type { Service } from "./rpc.js";

/** The branches of a rollout whose last prompt is kept, as `CallView.suffix_only` demands. */
const BRANCHES_KEPT = 16;
/** Beyond so many bytes, the prompts of the rollouts whose last call is oldest are dropped. */
const BYTES_KEPT = 256 << 20;

interface Kept {
  readonly callId: string;
  readonly prompt: Uint8Array;
}

/** The last prompt of each of the newest branches of each open rollout. Maps keep the order in which they were filled. */
export class Prompts {
  readonly #service: Service;
  readonly #client: Client<typeof InterceptService>;
  readonly #mostBytes: number;
  readonly #rollouts = new Map<string, Map<string, Kept>>();
  #bytes = 0;

  constructor(service: Service, client: Client<typeof InterceptService>, mostBytes = BYTES_KEPT) {
    this.#service = service;
    this.#client = client;
    this.#mostBytes = mostBytes;
  }

  /**
   * Makes the next calls of a stream carry their whole prompts, and gives each to `leased`, in their order.
   *
   * One that cannot be put together, or has another digest than the gate's, is fetched: none is guessed. Rejects with Unavailable,
   * PROMPT_UNKNOWN, where that fails: a new stream begins with whole prompts.
   */
  async completed(calls: readonly ModelCall[], leased: (call: ModelCall) => void): Promise<void> {
    for (const call of calls) {
      // Without a digest it is of a gate that leaves nothing out, or text.
      if (call.promptSha256.length > 0) {
        this.#keep(call, this.#joined(call) ?? (await this.#fetch(call)));
      }
      leased(call);
    }
  }

  #joined(call: ModelCall): Uint8Array | undefined {
    if (call.omittedPrefixCount === 0) {
      return call.promptTokenIds.slice(); // what came is a view of its whole frame
    }
    const start = this.#start(call);
    const whole = new Uint8Array(start.length + call.promptTokenIds.length);
    whole.set(start);
    whole.set(call.promptTokenIds, start.length);
    return isPromptOf(call, whole) ? whole : undefined;
  }

  async #fetch(message: ModelCall): Promise<Uint8Array> {
    const { callId, rolloutId } = message;
    const unknown = (cause?: unknown) =>
      new Unavailable(`The prompt of call ${callId} is not known`, { reason: "PROMPT_UNKNOWN", cause });
    const asked = this.#service.call((call) => this.#client.getCall({ callId, rolloutId }, call), { repeatable: true });
    const { promptTokenIds } = await asked.catch((error: unknown) => {
      throw unknown(error);
    });
    if (!isPromptOf(message, promptTokenIds)) {
      throw unknown();
    }
    return promptTokenIds;
  }

  /** Drops what is kept of closed rollouts. */
  forget(rolloutIds: Iterable<string>): void {
    for (const rolloutId of rolloutIds) {
      for (const { prompt } of this.#rollouts.get(rolloutId)?.values() ?? []) {
        this.#bytes -= prompt.length;
      }
      this.#rollouts.delete(rolloutId);
    }
  }

  /** Drops everything: a new stream begins with whole prompts. */
  clear(): void {
    this.#rollouts.clear();
    this.#bytes = 0;
  }

  #start(call: ModelCall): Uint8Array {
    for (const { callId, prompt } of this.#rollouts.get(call.rolloutId)?.values() ?? []) {
      if (callId === call.parentCallId) {
        return prompt.subarray(0, 4 * call.omittedPrefixCount);
      }
    }
    return new Uint8Array();
  }

  #keep(call: ModelCall, prompt: Uint8Array): void {
    call.promptTokenIds = prompt;
    call.omittedPrefixCount = 0;
    const branches = this.#rollouts.get(call.rolloutId) ?? new Map<string, Kept>();
    this.#rollouts.delete(call.rolloutId);
    this.#rollouts.set(call.rolloutId, branches);
    this.#drop(branches, call.branchId);
    branches.set(call.branchId, { callId: call.callId, prompt });
    this.#bytes += prompt.length;
    if (branches.size > BRANCHES_KEPT) {
      this.#drop(branches, first(branches));
    }
    while (this.#bytes > this.#mostBytes) {
      this.forget([first(this.#rollouts)]);
    }
  }

  #drop(branches: Map<string, Kept>, branchId: string): void {
    this.#bytes -= branches.get(branchId)?.prompt.length ?? 0;
    branches.delete(branchId);
  }
}

/** Whether these are the tokens that the gate has for the call. */
function isPromptOf(call: ModelCall, prompt: Uint8Array): boolean {
  return createHash("sha256").update(prompt).digest().equals(call.promptSha256);
}

function first(map: ReadonlyMap<string, unknown>): string {
  const [key = ""] = map.keys();
  return key;
}
