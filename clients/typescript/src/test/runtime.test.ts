/** The program that runs the package. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { it } from "node:test";
import { connect } from "../connection.js";
import { ConfigurationError } from "../errors.js";
import { OLDEST_NODE, requireNode } from "../runtime.js";

it("is refused in words where it is too old, and taken where it is not", () => {
  for (const version of ["20.20.2", "18.0.0", "8.17.0"]) {
    assert.throws(
      () => requireNode(version),
      (error) =>
        error instanceof ConfigurationError &&
        error.reason === "NODE_VERSION" &&
        error.message.startsWith(`@penstock/client needs Node.js 22 or newer; this is v${version}.`),
    );
  }
  for (const version of [undefined, "22.0.0", "24.1.0", "100.0.0"]) {
    requireNode(version);
  }
});

it("is looked at before anything is connected", () => {
  const versions = Object.getOwnPropertyDescriptor(process, "versions") as PropertyDescriptor;
  Object.defineProperty(process, "versions", { ...versions, value: { ...process.versions, node: "20.1.0" } });
  try {
    assert.throws(() => connect(), /needs Node.js 22 or newer; this is v20.1.0/);
  } finally {
    Object.defineProperty(process, "versions", versions);
  }
});

it("is as old as the package says that it may be", () => {
  const { engines } = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf-8"));
  assert.equal(engines.node, `>=${OLDEST_NODE}`);
});
