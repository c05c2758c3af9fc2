/** The driver's registry of agents: those that can run, and specs of your own. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import type { Cluster } from "../cluster.js";
import { present } from "../driver.js";
import type { AgentSpecSchema } from "../gen/penstock/driver/v1/agent_pb.js";
import {
  type Agent,
  AgentService,
  CheckAgentResponse_OutcomeSchema,
} from "../gen/penstock/driver/v1/agent_service_pb.js";
import type { Abortable } from "../handles.js";
import type { Service } from "../rpc.js";
import { word } from "../wire.js";

/** What an agent is; the proto's comments are the reference. */
export type AgentSpec = MessageInitShape<typeof AgentSpecSchema>;

/** A finding of `check`; `outcome` is progress, ok, warning (it works but could be better) or failed. */
export interface CheckFinding {
  readonly step: string;
  readonly outcome: string;
  readonly message: string;
}

/** `ps.agents`. */
export class Agents {
  readonly #service: Service;
  readonly #client: Client<typeof AgentService>;
  readonly #cluster: Cluster;

  constructor(service: Service, cluster: Cluster) {
    this.#cluster = cluster;
    this.#service = service;
    this.#client = service.client(AgentService);
  }

  /** All agents, sorted by name. */
  list({ signal }: Abortable = {}): AsyncGenerator<Agent, void> {
    return this.#service.pages(
      (pageToken, call) => this.#client.listAgents({ pageToken }, call),
      ({ agents }) => agents,
      signal,
    );
  }

  /** One agent; an older version of it by its digest. Rejects with NotFound AGENT_UNKNOWN. */
  async get(name: string, options: Abortable & { readonly specSha256?: string } = {}): Promise<Agent> {
    const { signal, specSha256 = "" } = options;
    const request = { name, specSha256 };
    const answer = await this.#service.call((call) => this.#client.getAgent(request, call), { signal, repeatable: true });
    return present(answer.agent);
  }

  /**
   * Adds an agent, or a new version of one of your own, at every driver.
   *
   * Rejects with InvalidArgument: `violations` name the fields; AlreadyExists AGENT_BUILT_IN; Unavailable: a driver is away, which
   * the message names; repeat it when that one is back.
   */
  async register(spec: AgentSpec, { signal }: Abortable = {}): Promise<Agent> {
    const options = { signal, repeatable: true };
    const [answer] = await this.#everywhere(signal, (service, client) =>
      service.call((call) => client.registerAgent({ spec }, call), options),
    );
    return present(answer?.agent);
  }

  /** Removes an agent of your own, at every driver; may be repeated. Rejects with FailedPrecondition AGENT_BUILT_IN. */
  async delete(name: string, { signal }: Abortable = {}): Promise<void> {
    const options = { signal, repeatable: true };
    await this.#everywhere(signal, (service, client) => service.call((call) => client.deleteAgent({ name }, call), options));
  }

  async #everywhere<A>(
    signal: AbortSignal | undefined,
    act: (service: Service, client: Client<typeof AgentService>) => Promise<A>,
  ): Promise<A[]> {
    const members = await this.#cluster.members("driver", { signal });
    return Promise.all(members.map(({ service }) => act(service, service.client(AgentService))));
  }

  /**
   * Reads an agent's spec, installs it, runs its check command in a sandbox; yields findings meanwhile.
   *
   * Rejects with NotFound AGENT_UNKNOWN.
   *
   * @param agent a registered agent's name, or a spec, which need not be registered.
   * @param options `backend` of the sandbox, default the operator's; `specOnly`: install nothing.
   */
  async *check(
    agent: string | AgentSpec,
    options: Abortable & { readonly backend?: string; readonly specOnly?: boolean } = {},
  ): AsyncGenerator<CheckFinding, void> {
    const { signal, backend = "", specOnly = false } = options;
    const request = { backend, specOnly, ...(typeof agent === "string" ? { name: agent } : { spec: agent }) };
    for await (const item of this.#service.stream((call) => this.#client.checkAgent(request, call), signal)) {
      const outcome = word(CheckAgentResponse_OutcomeSchema, item.outcome);
      yield { step: item.step, outcome, message: item.message };
    }
  }
}
