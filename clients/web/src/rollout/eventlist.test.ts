import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { FailureCause, RolloutEventSchema } from "@gen/penstock/driver/v1/rollout_pb";
import { h } from "preact";
import { describe, expect, test } from "vitest";

import { drawn } from "../testing/drawn";
import { EventList } from "./eventlist";

type Event = MessageInitShape<typeof RolloutEventSchema>["event"];

describe("an event is described", () => {
  test.each<[string, Event]>([
    ["paused for at most 10 min 0 s: new weights", { case: "paused", value: { reason: "new weights", maxDuration: { seconds: 600n } } }],
    ["paused", { case: "paused", value: {} }],
    ["goes on after 4.2 s (PAUSE_EXPIRED)", { case: "resumed", value: { pausedTime: { seconds: 4n, nanos: 200_000_000 }, reason: "PAUSE_EXPIRED" } }],
    ["the user's instruction 1: now the tests", { case: "userTurn", value: { index: 1, agentMessage: "done", instruction: "now the tests" } }],
    ["the user ends the conversation (SCRIPT_ENDED)", { case: "userTurn", value: { index: 2, endReason: "SCRIPT_ENDED" } }],
    ["cancelled: CANCELLED", { case: "ended", value: { failure: { cause: FailureCause.CANCELLED, reason: "CANCELLED" } } }],
    ["failed: AGENT_EXITED", { case: "ended", value: { failure: { cause: FailureCause.AGENT, reason: "AGENT_EXITED" } } }],
    ["an event that this page does not know: the services are newer", { case: undefined }],
  ])("%s", async (words, event) => {
    const page = await drawn(h(EventList, { events: [create(RolloutEventSchema, { sequence: 1n, event } as MessageInitShape<typeof RolloutEventSchema>)], dropped: 0 }));
    expect(page.root.ofClass("event-body").map((body) => body.text.trim())).toEqual([words]);
    await page.leave();
  });
});
