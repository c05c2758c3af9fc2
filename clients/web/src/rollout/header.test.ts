import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { FailureCause, Phase, RolloutSchema, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { h } from "preact";
import { describe, expect, test } from "vitest";

import { End } from "../compare/end";
import { drawn } from "../testing/drawn";
import { StateChip } from "./header";

const failed = (cause: FailureCause) => ({ cause, reason: "A_REASON" });

async function chip(what: Parameters<typeof drawn>[0]): Promise<[string | undefined, string | undefined]> {
  const page = await drawn(what);
  const [found] = page.root.ofClass("chip");
  const said: [string | undefined, string | undefined] = [found?.text, found?.attributes.get("class")];
  await page.leave();
  return said;
}

describe("how a rollout stands is said as the table of all rollouts says it", () => {
  test.each<[MessageInitShape<typeof RolloutSchema>, string, string]>([
    [{ phase: Phase.RUNNING }, "running", "chip busy"],
    [{ phase: Phase.RUNNING, paused: true }, "paused, running", "chip busy"],
    [{ phase: Phase.ENDED, outcome: {} }, "completed", "chip good"],
    [{ phase: Phase.ENDED, outcome: { failure: failed(FailureCause.AGENT) } }, "failed", "chip bad"],
    [{ phase: Phase.ENDED, outcome: { failure: failed(FailureCause.CANCELLED) } }, "cancelled", "chip warn"],
  ])("on its page: %j", async (rollout, words, look) => {
    expect(await chip(h(StateChip, { rollout: create(RolloutSchema, rollout) }))).toEqual([words, look]);
  });

  test.each<[MessageInitShape<typeof RolloutSummarySchema>, string, string]>([
    [{ phase: Phase.RUNNING, paused: true }, "paused, running", "chip busy"],
    [{ phase: Phase.ENDED }, "completed", "chip good"],
    [{ phase: Phase.ENDED, failure: failed(FailureCause.AGENT) }, "A_REASON", "chip bad"],
    [{ phase: Phase.ENDED, failure: failed(FailureCause.CANCELLED) }, "cancelled", "chip warn"],
  ])("beside its siblings: %j", async (rollout, words, look) => {
    expect(await chip(h(End, { rollout: create(RolloutSummarySchema, rollout) }))).toEqual([words, look]);
  });
});
