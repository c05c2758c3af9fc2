/** All engines of a connection's inference source: what changes an engine is done at each of them. */

import type { Client } from "@connectrpc/connect";
import type { Cluster } from "../cluster.js";
import { ConfigurationError, EnginesFailed, FailedPrecondition, PenstockError } from "../errors.js";
import { InferenceService } from "../gen/penstock/inference/v1/inference_service_pb.js";
import type { Service } from "../rpc.js";

/** One inference service; its name is empty where it is the only one. */
export interface Engine {
  readonly name: string;
  readonly service: Service;
  readonly client: Client<typeof InferenceService>;
}

/** What each engine answered, in the order of the gates' list, and the names of those that are lost and were not asked. */
export interface Done<T> {
  readonly answers: readonly T[];
  readonly away: readonly string[];
}

interface Found {
  readonly engines: readonly [Engine, ...Engine[]];
  readonly away: readonly string[];
}

/** The engines that the gates have a list of; without a list, the one at the connection's address. */
export class Engines {
  readonly #cluster: Cluster;
  /** The version of the last partial push, and the one that it was made for. */
  #base: { readonly version: number; readonly made: number } | undefined;
  /** The version that all engines had after this client's last push; -1 = unknown. */
  #pushed = -1;

  constructor(cluster: Cluster) {
    this.#cluster = cluster;
  }

  /**
   * Does something at all engines at once. Those that a gate cannot reach are left out, while others answer.
   *
   * Rejects with EnginesFailed: some of several engines failed, and the others have done it; else with the error of the only
   * engine, or the one that all have.
   */
  async atAll<T>(work: (engine: Engine) => Promise<T>, signal?: AbortSignal): Promise<Done<T>> {
    const { engines, away } = await this.#found(signal);
    if (engines.length === 1 && away.length === 0) {
      return { answers: [await work(engines[0])], away };
    }
    const results = await Promise.allSettled(engines.map(work));
    const failures: [string, PenstockError][] = [];
    const answers: T[] = [];
    for (const [at, result] of results.entries()) {
      if (result.status === "fulfilled") {
        answers.push(result.value);
      } else if (result.reason instanceof PenstockError) {
        failures.push([engines[at]?.name ?? "", result.reason]);
      } else {
        throw result.reason; // the signal's
      }
    }
    const [first] = failures;
    if (first === undefined) {
      return { answers, away };
    }
    const [, error] = first;
    if (answers.length === 0 && failures.every(([, other]) => other.name === error.name && other.reason === error.reason)) {
      throw error;
    }
    throw new EnginesFailed(Object.fromEntries(failures), Object.fromEntries(await inForce(engines, signal)));
  }

  /**
   * As `atAll`, for a push of some tensors: it is made for the newest older version that any engine has, or this client pushed
   * last. An engine with another version fails (BASE_VERSION_DIFFERS): its other tensors are not those that it was made for.
   */
  async pushPartial<T>(version: number, push: (engine: Engine) => Promise<T>, signal?: AbortSignal): Promise<Done<T>> {
    const { engines, away } = await this.#found(signal);
    if (engines.length === 1 && away.length === 0) {
      return this.atAll(push, signal);
    }
    const have = await inForce(engines, signal);
    const made = this.#base?.version === version ? this.#base.made : this.#madeFor(version, [...have.values()].filter((has) => has !== undefined));
    const checked = async (engine: Engine) => {
      const has = have.get(engine.name) ?? (await versionOf(engine, signal));
      if (has !== made && has !== version) {
        const message = `It has policy version ${has}, and the push is for engines with version ${made}: push all tensors`;
        throw new FailedPrecondition(message, { reason: "BASE_VERSION_DIFFERS" });
      }
      return push(engine);
    };
    return this.atAll(checked, signal);
  }

  /** Notes that all engines have a version. */
  pushed(version: number): void {
    this.#pushed = version;
  }

  /** The version that a partial push is made for; -1 = unknown. A repeat is made for the same one. */
  #madeFor(version: number, have: readonly number[]): number {
    // Where an engine has the version already, nobody knows for which one it was made.
    const older = have.includes(version) ? [] : [...have, this.#pushed].filter((has) => has < version);
    const made = Math.max(-1, ...older);
    if (have.length > 0) {
      this.#base = { version, made }; // else no engine answers, and a repeat asks again
    }
    return made;
  }

  /** The engine of a connection that has one. Rejects with ConfigurationError ENGINE_LIST: there are several. */
  async only(signal?: AbortSignal): Promise<Engine> {
    const { engines, away } = await this.#found(signal);
    if (engines.length + away.length > 1) {
      throw new ConfigurationError(
        "The gate has a list of engines, and this is done at one: connect to each by its address, with discover: false",
        { reason: "ENGINE_LIST" },
      );
    }
    return engines[0];
  }

  /** The engines that may answer, and the names of those that are lost; all may answer if all are lost. */
  async #found(signal?: AbortSignal): Promise<Found> {
    const members = await this.#cluster.engines(signal);
    const live = members.filter(({ isLost }) => !isLost);
    const asked = live.length > 0 ? live : members;
    const away = members.filter((member) => !asked.includes(member)).map(({ name }) => name);
    const engines = asked.map(({ name, service }) => ({ name, service, client: service.client(InferenceService) }));
    return { engines: engines as [Engine, ...Engine[]], away };
  }
}

/** The policy version of each engine's base weights, by its name; undefined = it does not answer. */
async function inForce(engines: readonly Engine[], signal?: AbortSignal): Promise<Map<string, number | undefined>> {
  const found = engines.map(async (engine): Promise<[string, number | undefined]> => {
    const { name } = engine;
    try {
      return [name, await versionOf(engine, signal)];
    } catch (error) {
      if (!(error instanceof PenstockError)) {
        throw error;
      }
      return [name, undefined];
    }
  });
  return new Map(await Promise.all(found));
}

async function versionOf({ service, client }: Engine, signal?: AbortSignal): Promise<number> {
  const info = await service.call((call) => client.getInfo({}, call), { signal, repeatable: "briefly" });
  return Number(info.policyVersion);
}
