import { create, toJson } from "@bufbuild/protobuf";
import { BranchRolloutRequestSchema } from "@gen/penstock/driver/v1/rollout_service_pb";
import { Replay } from "@gen/penstock/driver/v1/rollout_pb";
import fc from "fast-check";
import { expect, test } from "vitest";

import { type Continuation, EMPTY, orderOf, placed } from "./continuation";

const json = (form: Partial<Continuation>) => {
  const order = orderOf({ ...EMPTY, ...form });
  if ("errors" in order) throw new Error(JSON.stringify(order.errors));
  return toJson(BranchRolloutRequestSchema, create(BranchRolloutRequestSchema, order));
};
const errors = (form: Partial<Continuation>) => {
  const order = orderOf({ ...EMPTY, ...form });
  return "errors" in order ? order.errors : {};
};

test("the model is asked, exactly and with the rollout's seed, where nothing else is said", () => {
  expect(json({ text: "left from before", name: "left too", args: "{" })).toEqual({ count: 8, replay: "REPLAY_EXACT" });
});

test("a tool call is sent as it is written", () => {
  const args = ' {"command": "ls", "size": 12345678901234567890}\n';
  expect(json({ kind: "tool", name: " bash ", args })).toMatchObject({
    answer: { role: "ROLE_ASSISTANT", parts: [{ toolCall: { id: "given_0", name: "bash", argumentsJson: args.trim() } }] },
  });
  expect(json({ kind: "tool", name: "stop" })).toMatchObject({ answer: { parts: [{ toolCall: { argumentsJson: "{}" } }] } });
});

test("a text, a seed and what becomes of a branch that parts are sent", () => {
  const sent = json({ kind: "text", text: "Done.", count: " 2 ", seed: "9007199254740993", goesOn: true });
  expect(sent).toEqual({
    count: 2,
    answer: { role: "ROLE_ASSISTANT", parts: [{ text: { text: "Done." } }] },
    seed: "9007199254740993",
    replay: "REPLAY_UNTIL_DIVERGENCE",
  });
});

test("each field that is wrong is named, and nothing is sent", () => {
  expect(Object.keys(errors({ kind: "tool", name: " ", args: "{'command': 1}", count: "0", seed: "-1" })).sort()).toEqual(["args", "count", "name", "seed"]);
  expect(errors({ kind: "tool", name: "bash", args: "{'command': 1}" }).args).toContain("not JSON");
  for (const args of ["[]", "null", "7", '"ls"']) expect(errors({ kind: "tool", name: "bash", args }).args).toContain("expected a JSON object");
  expect(errors({ kind: "text" })).toEqual({ text: "is required" });
  for (const count of ["", "257", "1.5", "many"]) expect(errors({ count }).count).toContain("1 to 256");
  expect(errors({ seed: "9223372036854775807", count: "1" })).toEqual({});
  expect(errors({ seed: "9223372036854775807", count: "2" }).seed).toContain("9223372036854775806");
});

test("any object is taken as arguments", () => {
  fc.assert(
    fc.property(fc.dictionary(fc.string(), fc.jsonValue()), (value) => {
      const order = orderOf({ ...EMPTY, kind: "tool", name: "bash", args: JSON.stringify(value) });
      expect(order).toMatchObject({ replay: Replay.EXACT });
    }),
  );
});

test("what the driver refuses is shown at the field that it is about", () => {
  const violations = [
    { field: "answer.parts[0].tool_call.name", description: "is required" },
    { field: "answer", description: "at most 1048576 bytes" },
    { field: "seed", description: "too large" },
    { field: "rollout_id", description: "is required" },
  ];
  expect(placed(violations, "tool")).toEqual({ name: "is required", args: "at most 1048576 bytes", seed: "too large" });
  expect(placed(violations, "text")).toEqual({ text: "is required; at most 1048576 bytes", seed: "too large" });
});
