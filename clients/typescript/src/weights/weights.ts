/** New weights for an engine: pushed as one file, named by path, or moved by the trainer itself; and adapters. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions, Client } from "@connectrpc/connect";
import type { Cluster } from "../cluster.js";
import { present } from "../driver.js";
import { Aborted, InvalidArgument, Unavailable } from "../errors.js";
import {
  type Adapter,
  type InferenceService,
  type LoadAdapterRequestSchema,
  PauseModeSchema,
  type UpdatePhases,
  type UpdateWeightsRequestSchema,
  WeightFormat,
} from "../gen/penstock/inference/v1/inference_service_pb.js";
import type { Abortable } from "../handles.js";
import { Backoff, type Service } from "../rpc.js";
import { duration, milliseconds, number } from "../wire.js";
import { type Done, type Engine, Engines } from "./engines.js";
import { type TensorFile, type Tensors, tensorFile } from "./safetensors.js";

const WEIGHTS_MS = 600_000;
/** How long a push to one of several engines waits for another one that runs there: others may hand weights on to it. */
const OTHERS_MS = 60_000;

/** What becomes of generations in flight: they are aborted, finished first, or kept (the default). */
export type PauseMode = "abort" | "wait" | "keep";

export interface WeightOptions extends Abortable {
  readonly mode?: PauseMode;
}

export interface UpdateOptions extends WeightOptions {
  /** Only some tensors are given; the others stay. */
  readonly partial?: boolean;
}

/** What an update did; absent = not known. Of several engines, each step lasted as long as at the slowest one. */
export interface WeightUpdate {
  readonly policyVersion: number;
  readonly transferMs: number | undefined;
  readonly pauseMs: number | undefined;
  readonly loadMs: number | undefined;
  /** Names of engines that do not answer and got nothing. They get calls again when they have these weights. */
  readonly away: readonly string[];
}

/** The part of `ps.inference` that moves weights. */
export class Weights {
  protected readonly service: Service;
  protected readonly client: Client<typeof InferenceService>;
  readonly #engines: Engines;

  /** @param cluster has the other engines, where the gates have a list. */
  constructor(service: Service, client: Client<typeof InferenceService>, cluster: Cluster) {
    this.service = service;
    this.client = client;
    this.#engines = new Engines(cluster);
  }

  /** The version of the base weights that are in force. */
  async policyVersion({ signal }: Abortable = {}): Promise<number> {
    const info = await this.service.call((call) => this.client.getInfo({}, call), { signal, repeatable: true });
    return Number(info.policyVersion);
  }

  /**
   * Replaces the weights by those of a version greater than the one in force, atomically: an update that fails leaves the old
   * ones. Generations in flight go on under the new weights. Sent once more where the service went away meanwhile. Where the gates
   * have a list of engines, all get it.
   *
   * Rejects with FailedPrecondition POLICY_VERSION_NOT_NEWER, TENSOR_UNKNOWN, TENSOR_MISSING, TENSOR_SHAPE; Aborted
   * UPDATE_IN_PROGRESS; InvalidArgument NO_TENSORS, TENSOR_DTYPE, TENSOR_SIZE: nothing was sent; EnginesFailed: some of several
   * engines failed, also for BASE_VERSION_DIFFERS: the engine's other tensors are not those that a partial update was made for.
   */
  async updateWeights(version: number, tensors: Tensors, options: UpdateOptions = {}): Promise<WeightUpdate> {
    const file = tensorFile(tensors);
    const { sizeBytes, sha256 } = file;
    return this.#update({ ...beginning(version, options), sizeBytes, sha256 }, file, options.signal);
  }

  /**
   * As `updateWeights`, from files that the service reads itself: a safetensors file, or a directory of them, under its
   * weights_dir. They must not change while their weights are in force.
   *
   * Rejects with FailedPrecondition PATHS_OFF; InvalidArgument PATH_REFUSED; and as `updateWeights`.
   */
  async updateWeightsFrom(version: number, path: string, options: UpdateOptions = {}): Promise<WeightUpdate> {
    return this.#update({ ...beginning(version, options), path }, undefined, options.signal);
  }

  /**
   * Sets up transfers in which the trainer moves weights itself; once, before the first `startTransfer`.
   *
   * Rejects with Unsupported CAPABILITY_MISSING; InvalidArgument TRANSFER_REFUSED, NOT_JSON; ConfigurationError ENGINE_LIST: the
   * gates have a list of engines, so connect to each by its address, with `discover: false`.
   *
   * @param backend one of those that `info()` names, as "nccl"; `options` are the backend's, written as JSON.
   */
  async initTransfer(backend: string, options: unknown = {}, { signal }: Abortable = {}): Promise<void> {
    const request = { backend, optionsJson: asJson(options, "options") };
    const { service, client } = await this.#engines.only(signal);
    await service.call((call) => client.initTransfer(request, call), { signal, timeoutMs: WEIGHTS_MS });
  }

  /**
   * Pauses the engine for the weights of a version, which the trainer moves itself.
   *
   * Rejects with Aborted UPDATE_IN_PROGRESS; FailedPrecondition POLICY_VERSION_NOT_NEWER; Unsupported CAPABILITY_MISSING;
   * ConfigurationError ENGINE_LIST, as `initTransfer`.
   *
   * @param options `idleTimeoutMs`: after so long without tensors the engine abandons it. Default 5 min.
   */
  async startTransfer(
    version: number,
    options: WeightOptions & { readonly idleTimeoutMs?: number } = {},
  ): Promise<WeightTransfer> {
    const { mode = "keep", idleTimeoutMs, signal } = options;
    const request = {
      requestId: randomBytes(16).toString("hex"),
      policyVersion: BigInt(version),
      mode: number(PauseModeSchema, mode),
      idleTimeout: duration(idleTimeoutMs),
    };
    const { service, client } = await this.#engines.only(signal);
    const answer = await service.call((call) => client.startTransfer(request, call), {
      signal,
      timeoutMs: WEIGHTS_MS,
      repeatable: true,
    });
    return new WeightTransfer(service, client, answer.transferId);
  }

  /**
   * Loads a LoRA adapter, or a newer version of one, beside the base weights, atomically.
   *
   * Rejects with Unsupported CAPABILITY_MISSING; FailedPrecondition POLICY_VERSION_NOT_NEWER; InvalidArgument ADAPTER_INVALID,
   * NOT_JSON; ResourceExhausted ADAPTER_LIMIT; EnginesFailed: some of several engines failed.
   *
   * @param tensors those of PEFT's `adapter_model.safetensors`.
   * @param config the content of its `adapter_config.json`: `r`, `lora_alpha`, `target_modules`.
   */
  async loadAdapter(
    name: string,
    version: number,
    tensors: Tensors,
    config: Readonly<Record<string, unknown>>,
    { mode = "keep", signal }: WeightOptions = {},
  ): Promise<Adapter> {
    const begin = {
      name,
      policyVersion: BigInt(version),
      adapterConfigJson: asJson(config, "config"),
      mode: number(PauseModeSchema, mode),
    };
    return this.#load(begin, tensorFile(tensors), signal);
  }

  /** As `loadAdapter`, from a directory as PEFT saves it, under the service's adapters_dir. Also rejects with FailedPrecondition PATHS_OFF. */
  async loadAdapterFrom(
    name: string,
    version: number,
    path: string,
    { mode = "keep", signal }: WeightOptions = {},
  ): Promise<Adapter> {
    const begin = { name, policyVersion: BigInt(version), path, mode: number(PauseModeSchema, mode) };
    return this.#load(begin, undefined, signal);
  }

  /** Unloads an adapter; its completions in flight go on. Does nothing where it is not loaded. */
  async unloadAdapter(name: string, { signal }: Abortable = {}): Promise<void> {
    const options = { signal, timeoutMs: WEIGHTS_MS, repeatable: true };
    await this.#engines.atAll(
      ({ service, client }) => service.call((call) => client.unloadAdapter({ name }, call), options),
      signal,
    );
  }

  /** The loaded adapters, sorted by name. Rejects with Unsupported CAPABILITY_MISSING. */
  adapters({ signal }: Abortable = {}): AsyncGenerator<Adapter, void> {
    return this.service.pages(
      (pageToken, call) => this.client.listAdapters({ pageToken }, call),
      ({ adapters }) => adapters,
      signal,
    );
  }

  /** Stops generating until `resume`; new requests wait. @returns the generations in flight or waiting. */
  async pause({ mode = "keep", signal }: WeightOptions = {}): Promise<number> {
    const request = { mode: number(PauseModeSchema, mode) };
    const options = { signal, timeoutMs: WEIGHTS_MS, repeatable: true };
    const { answers } = await this.#engines.atAll(
      ({ service, client }) => service.call((call) => client.pause(request, call), options),
      signal,
    );
    return answers.reduce((sum, { inFlightCount }) => sum + inFlightCount, 0);
  }

  /** Lets the engine generate again. */
  async resume({ signal }: Abortable = {}): Promise<void> {
    const options = { signal, repeatable: true };
    await this.#engines.atAll(({ service, client }) => service.call((call) => client.resume({}, call), options), signal);
  }

  async #update(begin: Beginning, file: TensorFile | undefined, signal?: AbortSignal): Promise<WeightUpdate> {
    async function* frames(): AsyncGenerator<MessageInitShape<typeof UpdateWeightsRequestSchema>, void> {
      yield { frame: { case: "begin", value: begin } };
      for (const value of file?.chunks() ?? []) {
        yield { frame: { case: "chunk", value } };
      }
      yield { frame: { case: "commit", value: { sha256: file?.sha256 ?? new Uint8Array() } } };
    }
    const once = async ({ service, client }: Engine) =>
      updateFrom(await pushed(service, (call) => client.updateWeights(frames(), call), signal));
    const push = (engine: Engine) => (engine.name ? afterOthers(engine.service, () => once(engine), signal) : once(engine));
    const isPartial = begin.format === WeightFormat.SAFETENSORS_PARTIAL;
    const version = Number(begin.policyVersion);
    const done = isPartial ? await this.#engines.pushPartial(version, push, signal) : await this.#engines.atAll(push, signal);
    this.#engines.pushed(version);
    return together(done);
  }

  async #load(begin: AdapterBeginning, file: TensorFile | undefined, signal?: AbortSignal): Promise<Adapter> {
    async function* frames(): AsyncGenerator<MessageInitShape<typeof LoadAdapterRequestSchema>, void> {
      yield { frame: { case: "begin", value: begin } };
      for (const value of file?.chunks() ?? []) {
        yield { frame: { case: "chunk", value } };
      }
      yield { frame: { case: "commit", value: { sha256: file?.sha256 ?? new Uint8Array() } } };
    }
    const { answers } = await this.#engines.atAll(
      ({ service, client }) => pushed(service, (call) => client.loadAdapter(frames(), call), signal),
      signal,
    );
    return present(answers[0]?.adapter);
  }
}

/** Sends a client stream; once more where the service went away, which changes nothing that was done already. */
async function pushed<A>(service: Service, method: (options: CallOptions) => Promise<A>, signal?: AbortSignal): Promise<A> {
  const options = { signal, timeoutMs: WEIGHTS_MS };
  try {
    return await service.call(method, options);
  } catch (error) {
    if (!(error instanceof Unavailable)) {
      throw error;
    }
    await service.pause(new Backoff().next(error), signal);
    return service.call(method, options);
  }
}

/** What a push gives, repeated while another one runs at the engine. */
async function afterOthers<A>(service: Service, push: () => Promise<A>, signal?: AbortSignal): Promise<A> {
  const backoff = new Backoff();
  for (const until = performance.now() + OTHERS_MS; ; ) {
    try {
      return await push();
    } catch (error) {
      if (!(error instanceof Aborted) || error.reason !== "UPDATE_IN_PROGRESS" || performance.now() >= until) {
        throw error;
      }
      await service.pause(backoff.next(error), signal);
    }
  }
}

/** The result of a push to all engines. */
function together({ answers, away }: Done<WeightUpdate>): WeightUpdate {
  const slowest = (times: readonly (number | undefined)[]) => {
    const known = times.filter((time) => time !== undefined);
    return known.length === 0 ? undefined : Math.max(...known);
  };
  return {
    policyVersion: Math.min(...answers.map(({ policyVersion }) => policyVersion)),
    transferMs: slowest(answers.map(({ transferMs }) => transferMs)),
    pauseMs: slowest(answers.map(({ pauseMs }) => pauseMs)),
    loadMs: slowest(answers.map(({ loadMs }) => loadMs)),
    away,
  };
}

type Frame<S extends typeof UpdateWeightsRequestSchema | typeof LoadAdapterRequestSchema> = NonNullable<
  MessageInitShape<S>["frame"]
>;
type Beginning = Extract<Frame<typeof UpdateWeightsRequestSchema>, { case: "begin" }>["value"];
type AdapterBeginning = Extract<Frame<typeof LoadAdapterRequestSchema>, { case: "begin" }>["value"];

function beginning(version: number, { mode = "keep", partial = false }: UpdateOptions) {
  return {
    policyVersion: BigInt(version),
    format: partial ? WeightFormat.SAFETENSORS_PARTIAL : WeightFormat.SAFETENSORS,
    mode: number(PauseModeSchema, mode),
  };
}

/**
 * Weights that the trainer moves itself (NCCL, IPC) while the engine is paused: `tensors`, then `commit` or `abandon`.
 * `await using` abandons what was not committed.
 */
export class WeightTransfer {
  readonly #service: Service;
  readonly #client: Client<typeof InferenceService>;
  readonly transferId: string;
  #over = false;

  constructor(service: Service, client: Client<typeof InferenceService>, transferId: string) {
    this.#service = service;
    this.#client = client;
    this.transferId = transferId;
  }

  /**
   * Makes the engine receive some tensors, which the trainer sends meanwhile; the descriptor is the backend's, written as JSON.
   *
   * Rejects with InvalidArgument TRANSFER_REFUSED, NOT_JSON; FailedPrecondition NO_TRANSFER: it was abandoned meanwhile.
   */
  async tensors(descriptor: unknown, { signal }: Abortable = {}): Promise<void> {
    const request = { transferId: this.transferId, descriptorJson: asJson(descriptor, "descriptor") };
    await this.#service.call((call) => this.#client.transferTensors(request, call), { signal, timeoutMs: WEIGHTS_MS });
  }

  /** Puts the version in force; generations go on. */
  async commit({ signal }: Abortable = {}): Promise<WeightUpdate> {
    return this.#finish(true, signal);
  }

  /** Ends it with the old weights in force. Does nothing where it has ended. */
  async abandon({ signal }: Abortable = {}): Promise<void> {
    if (!this.#over) {
      await this.#finish(false, signal);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.abandon();
  }

  async #finish(commit: boolean, signal?: AbortSignal): Promise<WeightUpdate> {
    this.#over = true;
    const request = { transferId: this.transferId, commit };
    const options = { signal, timeoutMs: WEIGHTS_MS, repeatable: true };
    return updateFrom(await this.#service.call((call) => this.#client.finishTransfer(request, call), options));
  }
}

function updateFrom(answer: { policyVersion: bigint; phases?: UpdatePhases | undefined }): WeightUpdate {
  const { policyVersion, phases } = answer;
  return {
    policyVersion: Number(policyVersion),
    transferMs: milliseconds(phases?.transfer),
    pauseMs: milliseconds(phases?.pause),
    loadMs: milliseconds(phases?.load),
    away: [],
  };
}

function asJson(value: unknown, what: string): string {
  try {
    const text = JSON.stringify(value);
    if (text !== undefined) {
      return text;
    }
  } catch (error) {
    throw new InvalidArgument(`The ${what} cannot be written as JSON: ${String(error)}`, { reason: "NOT_JSON", cause: error });
  }
  throw new InvalidArgument(`The ${what} cannot be written as JSON`, { reason: "NOT_JSON" });
}
