/** Results of assays: the digest of a task is that of all clients. The conformance suite has the rest. */

import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { digestOf } from "../assays.js";
import { specOf, type Task } from "../tasks.js";

const TASK: Task = {
  taskId: "tá",
  instruction: "i",
  metadata: { b: 1.5, a: [true, null, "x"] },
  env: { B: "2", A: "" },
  setup: [{ argv: ["true"], timeoutMs: 1500 }],
  verifier: { commands: ["true"], componentRanges: { c: [0, 1] } },
};

describe("the digest of a task", () => {
  it("is that of the other clients, whatever is empty", () => {
    const spec = specOf(TASK, "shell", {
      sandbox: { image: "x:1", resources: { cpu: 0.5, memoryBytes: 2 ** 33 } },
      limits: { agentMs: 2000 },
      budgets: {},
      labels: { mine: "yes" },
    });
    // As Task.load in Python reads a file of the task: with its permission bits.
    spec.task?.files.push({ $typeName: "penstock.sandbox.v1.SeedFile", path: "f", content: Uint8Array.of(0, 255), mode: 0o644 });
    assert.equal(digestOf(spec), "86cc3c848c2d985156b9a2598fef371d91c48afc89e0176848f236aa9d43e9e2");
    spec.limits = undefined;
    assert.notEqual(digestOf(spec), "86cc3c848c2d985156b9a2598fef371d91c48afc89e0176848f236aa9d43e9e2");
  });
});
