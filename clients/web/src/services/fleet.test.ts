import { create } from "@bufbuild/protobuf";
import { describe, expect, test } from "vitest";
import { GetStatusResponseSchema } from "@gen/penstock/ops/v1/operations_service_pb";

import type { Kind } from "../lib/transport";
import { type FleetRow, load, withEngineLoads } from "./fleet";

const status = (...gauges: readonly (readonly [string, number, Record<string, string>?])[]) =>
  create(GetStatusResponseSchema, { gauges: gauges.map(([name, value, labels = {}]) => ({ name, value, labels })) });

describe("what runs at a service", () => {
  test.each<[Kind, ReturnType<typeof status>, string]>([
    ["driver", status(["penstock_driver_rollouts", 7, { phase: "running" }], ["penstock_driver_rollouts", 2, { phase: "verifying" }], ["penstock_driver_rollouts", 40, { phase: "queued" }]), "9 rollouts run, 40 wait"],
    ["interception", status(["penstock_gate_rollouts", 9], ["penstock_gate_open_calls", 3, { state: "queued" }], ["penstock_gate_open_calls", 2, { state: "leased" }]), "9 rollouts, 5 open calls"],
    ["sandbox", status(["penstock_sandbox_sandboxes", 4, { state: "ready" }], ["penstock_node_room", 12]), "4 sandboxes, room for 12"],
    ["sandbox", status(["penstock_sandbox_sandboxes", 4, { state: "ready" }]), "4 sandboxes"],
    ["inference", status(["penstock_inference_running_requests", 6], ["penstock_inference_waiting_requests", 1]), "6 requests run, 1 wait"],
  ])("is said of a %s in words", (kind, told, words) => expect(load({ kind, status: told })).toBe(words));

  test("is not said where it is not known", () => expect(load({ kind: "driver", status: null })).toBe(""));

  test("is said of a listed engine by the gates that reach it", () => {
    const labels = (engine: string) => ({ pool: "default", engine });
    const told = status(
      ["penstock_gate_engine_running_requests", 6, labels("e0")],
      ["penstock_gate_engine_waiting_requests", 1, labels("e0")],
      ["penstock_gate_engine_policy_version", 12, labels("e0")],
      ["penstock_gate_engine_policy_version", 11, labels("e1")],
    );
    const row = (kind: Kind, name: string, own: FleetRow["status"] = null): FleetRow => ({ kind, name, address: "", state: "up", status: own, problems: [] });
    const rows = withEngineLoads([row("interception", "g0", told), row("interception", "g1"), ...["e0", "e1", "e2"].map((name) => row("inference", name))]);
    expect(rows.slice(2).map(load)).toEqual(["6 requests run, 1 wait, policy version 12", "policy version 11", ""]);
  });
});
