import { create } from "@bufbuild/protobuf";
import { CaptureLevel, Finding_Severity, FindingSchema, Grade } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { expect, test } from "vitest";

import type { Capture } from "./records";
import { captureStanding } from "./standing";

const NO_CAPTURE: Capture = {
  ...{ calls: [], branches: [], samples: [], findings: [], hostToolCalls: [], annotations: [], tokenizerSha256: new Uint8Array(), isWhole: false },
  grade: Grade.UNSPECIFIED,
  captureLevel: CaptureLevel.UNSPECIFIED,
};
const finding = (reason: string) => create(FindingSchema, { reason, severity: Finding_Severity.FATAL });

test("while a rollout runs nothing is settled, and what only its end can tell is no finding", () => {
  const capture = { ...NO_CAPTURE, grade: Grade.UNUSABLE, captureLevel: CaptureLevel.TOKENS, findings: [finding("NOTHING_TO_TRAIN"), finding("TOKENS_DIFFER")] };
  const standing = captureStanding(capture, false, true);
  expect(standing).toMatchObject({ grade: Grade.UNSPECIFIED, word: "not yet" });
  expect(standing.sentence).toContain("exact tokens");
  expect(standing.findings.map((one) => one.reason)).toEqual(["TOKENS_DIFFER"]);
});

test("one that ended without a capture has none, which is not the same as not yet", () => {
  expect(captureStanding(NO_CAPTURE, true, true)).toMatchObject({ word: "none", sentence: "There is no capture of this rollout." });
  expect(captureStanding(NO_CAPTURE, true, false).word).toBe("reading…");
});

test("one that ended is as it was graded, with all that was found", () => {
  const capture = { ...NO_CAPTURE, isWhole: true, grade: Grade.UNUSABLE, captureLevel: CaptureLevel.TEXT, findings: [finding("NOTHING_TO_TRAIN")] };
  expect(captureStanding(capture, true, true)).toMatchObject({ grade: Grade.UNUSABLE, word: "unusable", findings: capture.findings });
});
