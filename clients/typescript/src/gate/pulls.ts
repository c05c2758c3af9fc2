/** Calls without a session: leased and answered by unary RPCs, for programs that would rather not hold a stream. */

import { randomBytes } from "node:crypto";
import { hostname } from "node:os";
import type { Client } from "@connectrpc/connect";
import { ModelCall } from "../calls.js";
import type { InterceptService } from "../gen/penstock/interception/v1/intercept_service_pb.js";
import type { Abortable } from "../handles.js";
import { rejection, sizeOf } from "../leases.js";
import { MAX_MESSAGE_BYTES, type Service } from "../rpc.js";
import { duration } from "../wire.js";

const WAIT_MS = 20_000;

export interface LeaseOptions extends Abortable {
  /** Most calls, 1 to 256. Default 1. */
  readonly maxCalls?: number;
  /** How long a call is waited for where none is there. Default 20 s. */
  readonly waitMs?: number;
  /** How long the calls stay leased. Default 5 min, at most 1 h. */
  readonly leaseMs?: number;
  /** Who leases them, for people. Default: this machine's name. */
  readonly identity?: string;
  /** The newest weights that the trainer has. */
  readonly policyVersion?: number;
  /** Whether calls carry messages and tools beside tokens. */
  readonly messages?: boolean;
  /** Whether they carry the agent's request body. */
  readonly bodies?: boolean;
}

interface Selector {
  readonly runId?: string;
  readonly groupId?: string;
  readonly rolloutIds?: readonly string[];
  readonly labels?: Readonly<Record<string, string>>;
}

type InterceptClient = Client<typeof InterceptService>;

/** Leases calls; empty where none came in time. */
export async function leaseCalls(
  service: Service,
  client: InterceptClient,
  options: LeaseOptions & Selector,
): Promise<ModelCall[]> {
  const { runId, groupId, rolloutIds = [], labels, maxCalls = 1, waitMs, policyVersion, signal } = options;
  const request = {
    requestId: randomBytes(16).toString("hex"),
    selector: { runId, groupId, rolloutIds: [...rolloutIds], labels: { ...labels } },
    identity: options.identity || hostname(),
    maxCalls,
    wait: duration(waitMs),
    lease: duration(options.leaseMs),
    view: { messages: options.messages ?? false, body: options.bodies ?? false },
    policyVersion: policyVersion === undefined ? undefined : BigInt(policyVersion),
    maxMessageBytes: BigInt(MAX_MESSAGE_BYTES),
  };
  // The gate waits for at most 80 % of the call's deadline.
  const timeoutMs = (waitMs ?? WAIT_MS) * 1.25 + 30_000;
  const answer = await service.call((call) => client.leaseCalls(request, call), { signal, timeoutMs, repeatable: true });
  return answer.calls.map((message) => {
    const call: ModelCall = new ModelCall(message, async (result) => {
      result.leaseId = message.leaseId;
      sizeOf(result); // throws InvalidCompletion where it cannot be sent
      const options = { repeatable: true };
      const { acknowledged } = await service.call((each) => client.completeCalls({ results: [result] }, each), options);
      const [rejected] = acknowledged?.rejected ?? [];
      if (rejected === undefined) {
        call.end("ANSWERED");
        return;
      }
      const error = rejection(rejected);
      if (!error.retryable) {
        call.end(error.reason);
      }
      throw error;
    });
    return call;
  });
}

/** Extends leases by their length. @returns the calls whose leases have ended. */
export async function extendLeases(
  service: Service,
  client: InterceptClient,
  calls: readonly ModelCall[],
  { signal }: Abortable,
): Promise<ModelCall[]> {
  const request = { extendLeaseIds: calls.map(({ message }) => message.leaseId) };
  const answer = await service.call((call) => client.completeCalls(request, call), { signal, repeatable: true });
  const lost = new Set(answer.lostLeaseIds);
  return calls.filter(({ message }) => lost.has(message.leaseId));
}
