// All services of all kinds, as the driver and the gate list them: which are there, what runs there, and what they report as wrong.
import { Code } from "@connectrpc/connect";
import { type GetStatusResponse, type Member, MemberState, OperationsService } from "@gen/penstock/ops/v1/operations_service_pb";

import { explain } from "../lib/errors";
import { members, serverInfo } from "../lib/members";
import { client, type Kind } from "../lib/transport";

export const KINDS: readonly Kind[] = ["driver", "interception", "sandbox", "inference"];
/** What people call them. */
export const KIND_NAMES: Readonly<Record<Kind, string>> = { driver: "driver", interception: "gate", sandbox: "sandbox service", inference: "engine" };

export interface Problem {
  readonly service: string;
  readonly message: string;
  readonly advice: string;
  readonly reason: string;
  readonly grave: boolean;
}

export type State = "up" | "draining" | "lost";

/** One service. */
export interface FleetRow {
  readonly kind: Kind;
  /** Its own name; empty = it has none, or has not answered. */
  readonly name: string;
  /** As the driver reaches it; empty = that of the connection. */
  readonly address: string;
  readonly state: State;
  /** Null = it does not answer, or the token may not ask. */
  readonly status: GetStatusResponse | null;
  readonly problems: readonly Problem[];
  /** What a gate says of an engine's load, in words. */
  readonly load?: string;
}

const STATES: Readonly<Record<MemberState, State>> = {
  [MemberState.UNSPECIFIED]: "up",
  [MemberState.UP]: "up",
  [MemberState.DRAINING]: "draining",
  [MemberState.LOST]: "lost",
};

/** Reads all of them; never fails: what does not answer is a problem. */
export async function readFleet(signal: AbortSignal): Promise<readonly FleetRow[]> {
  return withEngineLoads((await Promise.all(KINDS.map((kind) => readKind(kind, signal)))).flat());
}

/** What gates say of the engines of their lists, which the page does not reach, goes to the engines' rows. */
export function withEngineLoads(rows: readonly FleetRow[]): readonly FleetRow[] {
  const gauges = rows.flatMap((row) => (row.kind === "interception" ? (row.status?.gauges ?? []) : []));
  const of = (engine: string, name: string): number | undefined =>
    gauges.find((one) => one.name === `penstock_gate_engine_${name}` && one.labels["engine"] === engine)?.value;
  return rows.map((row) => {
    if (row.kind !== "inference" || row.status || !row.name) return row;
    const [running, waiting, version] = ["running_requests", "waiting_requests", "policy_version"].map((name) => of(row.name, name));
    const requests = running === undefined ? [] : [`${running} requests run, ${waiting ?? 0} wait`];
    return { ...row, load: [...requests, ...(version === undefined ? [] : [`policy version ${version}`])].join(", ") };
  });
}

async function readKind(kind: Kind, signal: AbortSignal): Promise<readonly FleetRow[]> {
  let listed: readonly Member[] = [];
  try {
    listed = await members(kind);
  } catch {
    // A driver or gate that does not answer is said at its own row; without its list there is the service of the connection.
  }
  if (listed.length) return Promise.all(listed.map((one) => readMember(kind, one, signal)));
  let name = "";
  let state: State = "up";
  try {
    const info = await serverInfo(kind);
    name = info.server?.name ?? "";
    state = info.draining ? "draining" : "up";
  } catch {
    // What its status says comes next.
  }
  const read = await readStatus(kind, "", kind, signal);
  if (!read) return [];
  return [{ kind, name, address: "", state: read.isAway ? "lost" : state, status: read.status, problems: read.problems }];
}

async function readMember(kind: Kind, { name, address, state }: Member, signal: AbortSignal): Promise<FleetRow> {
  const row = { kind, name, address, state: STATES[state] };
  // Of one that is lost the driver says so; an engine is not reached through the driver's list.
  if (row.state === "lost" || !name || kind === "inference") return { ...row, status: null, problems: [] };
  const read = await readStatus(kind, name, `${KIND_NAMES[kind]} ${name}`, signal);
  return { ...row, status: read?.status ?? null, problems: read?.problems ?? [] };
}

interface Read {
  readonly status: GetStatusResponse | null;
  readonly problems: readonly Problem[];
  readonly isAway: boolean;
}

/** Undefined = there is no such service, or the token may not ask: neither is a problem. */
async function readStatus(kind: Kind, member: string, service: string, signal: AbortSignal): Promise<Read | undefined> {
  try {
    const status = await client(OperationsService, member).getStatus({}, { signal, headers: { "penstock-service": kind } });
    const problems = status.troubles.map(({ message, advice, reason, grave }) => ({ service, message, advice, reason, grave }));
    return { status, problems, isAway: false };
  } catch (error) {
    const { reason, code, title, todo } = explain(error, `ask the ${service} for its status`);
    if (signal.aborted || reason === "SERVICE_ABSENT") return undefined;
    if (code === Code.PermissionDenied || code === Code.Unauthenticated) return { status: null, problems: [], isAway: false };
    return { status: null, problems: [{ service, message: title, advice: todo, reason: reason || Code[code] || "UNKNOWN", grave: true }], isAway: true };
  }
}

/** What runs at a service and what waits there, in words; empty where it is not known. */
export function load({ kind, status, load: told }: Pick<FleetRow, "kind" | "status" | "load">): string {
  if (!status) return told ?? "";
  const sum = (name: string, ...values: readonly string[]): number =>
    status.gauges
      .filter((one) => one.name === name && (!values.length || values.some((value) => Object.values(one.labels).includes(value))))
      .reduce((all, one) => all + one.value, 0);
  const has = (name: string): boolean => status.gauges.some((one) => one.name === name);
  switch (kind) {
    case "driver": {
      const queued = sum("penstock_driver_rollouts", "queued");
      return `${sum("penstock_driver_rollouts") - queued} rollouts run, ${queued} wait`;
    }
    case "interception":
      return `${sum("penstock_gate_rollouts")} rollouts, ${sum("penstock_gate_open_calls")} open calls`;
    case "sandbox":
      return `${sum("penstock_sandbox_sandboxes")} sandboxes${has("penstock_node_room") ? `, room for ${sum("penstock_node_room")}` : ""}`;
    case "inference":
      return `${sum("penstock_inference_running_requests")} requests run, ${sum("penstock_inference_waiting_requests")} wait`;
  }
}
