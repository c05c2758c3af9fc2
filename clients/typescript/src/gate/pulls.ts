/** Calls without a session: leased and answered by unary RPCs, for programs that would rather not hold a stream. */

import { randomBytes } from "node:crypto";
import { hostname } from "node:os";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { ModelCall } from "../calls.js";
import { isAway } from "../cluster.js";
import { InvalidArgument } from "../errors.js";
import {
  InterceptService,
  type LeaseCallsRequestSchema,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";
import type { Abortable } from "../handles.js";
import { rejection, sizeOf } from "../leases.js";
import { MAX_MESSAGE_BYTES, type Service } from "../rpc.js";
import { duration } from "../wire.js";

const WAIT_MS = 20_000;
/** Limit of the one request that asks a gate for the calls of a lease request that was aborted: leases of other gates run meanwhile. */
const SETTLE_MS = 10_000;

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
  readonly policyIds?: readonly string[];
}

type LeaseRequest = MessageInitShape<typeof LeaseCallsRequestSchema>;

/** The gate at which each call was leased. */
const LEASED_AT = new WeakMap<ModelCall, Service>();

/**
 * Leases calls at any of the gates; empty where none came in time. They are all asked at once. When one has calls the others are asked
 * no longer: what they have leased meanwhile is taken too, or put back where it is too much.
 */
export async function leaseCalls(gates: readonly Service[], options: LeaseOptions & Selector): Promise<ModelCall[]> {
  const { runId, groupId, rolloutIds = [], labels, policyIds = [], maxCalls = 1, waitMs, policyVersion, signal } = options;
  const request = {
    requestId: randomBytes(16).toString("hex"),
    selector: { runId, groupId, rolloutIds: [...rolloutIds], labels: { ...labels }, policyIds: [...policyIds] },
    identity: options.identity || hostname(),
    maxCalls,
    wait: duration(waitMs ?? WAIT_MS),
    lease: duration(options.leaseMs),
    view: { messages: options.messages ?? false, body: options.bodies ?? false },
    policyVersion: policyVersion === undefined ? undefined : BigInt(policyVersion),
    maxMessageBytes: BigInt(MAX_MESSAGE_BYTES),
  };
  // The gate waits for at most 80 % of the call's deadline.
  const timeoutMs = (waitMs ?? WAIT_MS) * 1.25 + 30_000;
  const [only, ...others] = gates;
  if (only !== undefined && others.length === 0) {
    return leasedAt(only, request, timeoutMs, signal);
  }
  const found = new AbortController();
  const either = signal === undefined ? found.signal : AbortSignal.any([signal, found.signal]);
  const away: unknown[] = [];
  const asked = gates.map(async (gate): Promise<ModelCall[]> => {
    try {
      const calls = await leasedAt(gate, request, timeoutMs, either);
      if (calls.length > 0) {
        found.abort();
      }
      return calls;
    } catch (error) {
      signal?.throwIfAborted();
      if (!found.signal.aborted) {
        away.push(error);
        if (!isAway(error)) {
          found.abort();
        }
        return [];
      }
      // The same request again: its answer has what the gate leased to it before it was cancelled.
      return leasedAt(gate, { ...request, wait: duration(0) }, SETTLE_MS, signal, false).catch(() => []); // else the leases end
    }
  });
  const leased = (await Promise.all(asked)).flat();
  signal?.throwIfAborted();
  const failure = away.find((error) => !isAway(error)) ?? (away.length === gates.length ? away[0] : undefined);
  if (leased.length === 0 && failure !== undefined) {
    throw failure;
  }
  await Promise.all(leased.splice(maxCalls).map((call) => call.release().catch(() => {}))); // else its lease ends
  return leased;
}

async function leasedAt(
  service: Service,
  request: LeaseRequest,
  timeoutMs: number,
  signal: AbortSignal | undefined,
  repeatable = true,
): Promise<ModelCall[]> {
  const client = service.client(InterceptService);
  const answer = await service.call((call) => client.leaseCalls(request, call), { signal, timeoutMs, repeatable });
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
    LEASED_AT.set(call, service);
    return call;
  });
}

/** Extends leases by their length, each at its gate. @returns the calls whose leases have ended. */
export async function extendLeases(calls: readonly ModelCall[], { signal }: Abortable): Promise<ModelCall[]> {
  const lost = new Set<string>();
  const gates = Map.groupBy(calls, (call) => LEASED_AT.get(call));
  for (const [service, held] of gates) {
    if (service === undefined) {
      throw new InvalidArgument("Only calls of leaseCalls have leases of their own", { reason: "NOT_LEASED" });
    }
    const client = service.client(InterceptService);
    const request = { extendLeaseIds: held.map(({ message }) => message.leaseId) };
    const answer = await service.call((call) => client.completeCalls(request, call), { signal, repeatable: true });
    for (const leaseId of answer.lostLeaseIds) {
      lost.add(leaseId);
    }
  }
  return calls.filter(({ message }) => lost.has(message.leaseId));
}
