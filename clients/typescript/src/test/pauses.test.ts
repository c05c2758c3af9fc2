/** What is asked of the flow of calls, and whose answer an answer of the gate is (R26). */

import assert from "node:assert/strict";
import { beforeEach, describe, it, mock } from "node:test";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { Frame } from "../conversations.js";
import { SessionLost } from "../errors.js";
import { Pauses } from "../pauses.js";
import { milliseconds } from "../wire.js";

describe("pauses of a session", () => {
  let sent: (string | undefined)[] = [];
  let pauses: Pauses;

  beforeEach(() => {
    sent = [];
    pauses = new Pauses((frame: Frame) => sent.push(frame.case));
  });

  const unanswered = () => pauses.unanswered.map((frame) => frame.case);

  function askedAnew(): (string | undefined)[] {
    sent = [];
    pauses.beganStream();
    return sent;
  }

  it("are asked for themselves after a resume that nobody waited for, and answered in order", async () => {
    const asked = [pauses.pause("", undefined), pauses.resume(), pauses.pause("", undefined), pauses.pause("", undefined)];
    assert.deepEqual(sent, ["pause", "resume", "pause"]);
    pauses.paused(1);
    pauses.resumed();
    pauses.resumed(); // the first one ran out in between: nobody's answer
    pauses.paused(2);
    assert.deepEqual(await Promise.all(asked), [1, undefined, 2, 2]);
  });

  it("that differ in their time are not one", async () => {
    const asked = [pauses.pause("", 1), pauses.pause("", 2)];
    assert.deepEqual(sent, ["pause", "pause"]);
    pauses.paused(1);
    pauses.paused(2);
    assert.deepEqual(await Promise.all(asked), [1, 2]);
  });

  it("are told again, in order, to a gate that may not have heard them", async () => {
    const asked = [pauses.pause("", undefined), pauses.resume(), pauses.pause("", undefined)];
    pauses.paused(1);
    pauses.resumed();
    assert.deepEqual([unanswered(), askedAnew()], [["pause"], []]);
    pauses.paused(2);
    await Promise.all(asked);
    assert.deepEqual([unanswered(), askedAnew()], [[], ["pause"]]);
  });

  it("that ran out, or were ended, are not wanted any more", async () => {
    const pausing = pauses.pause("", 1);
    pauses.paused(0);
    await pausing;
    pauses.resumed();
    assert.deepEqual(askedAnew(), []);
  });

  it("are requested again for the time that is left, unless none is left", async () => {
    let now = 1000;
    mock.method(performance, "now", () => now);
    try {
      const left: number[] = [];
      pauses = new Pauses((frame: Frame) => {
        assert.equal(frame.case, "pause");
        left.push(Number(frame.value.maxDuration?.seconds));
      });
      const asked = pauses.pause("weights", 90_000);
      pauses.paused(0);
      await asked;
      now += 60_000;
      pauses.beganStream();
      assert.equal(pauses.isUnconfirmed, true);
      now += 30_000;
      pauses.beganStream();
      assert.deepEqual([left, pauses.isUnconfirmed], [[90, 30], false]);
    } finally {
      mock.restoreAll();
    }
  });

  it("that are to last longer put back what a gate leases that has forgotten them", async () => {
    const pausing = pauses.pause("push", 120_000);
    pauses.paused(0);
    await pausing;
    const longer = pauses.pause("push", 240_000);
    assert.deepEqual([unanswered(), askedAnew(), pauses.isUnconfirmed], [["pause"], [], true]);
    pauses.paused(3);
    assert.deepEqual([await longer, pauses.isUnconfirmed], [3, false]);
    const resuming = pauses.resume();
    assert.deepEqual([askedAnew(), pauses.isUnconfirmed], [[], false]);
    pauses.resumed();
    await resuming;
  });

  it("that began without a gate last there for what is left of them, and whole for whoever waits for it", async () => {
    let now = 1000;
    mock.method(performance, "now", () => now);
    try {
      const left = () =>
        pauses.unanswered.map((frame) => {
          assert.equal(frame.case, "pause");
          return milliseconds(frame.value.maxDuration as Duration);
        });
      const asked = [pauses.pause("weights", 60_000)];
      pauses.beganWithoutIt();
      now += 20_000;
      assert.deepEqual(left(), [40_000]);
      now += 300_000;
      assert.deepEqual(left(), [1]); // it still has to answer
      asked.push(pauses.pause("weights", 60_000));
      now += 300_000;
      assert.deepEqual(left(), [60_000]);
      pauses.paused(2);
      assert.deepEqual(await Promise.all(asked), [2, 2]);
    } finally {
      mock.restoreAll();
    }
  });

  it("reject when the session ends", async () => {
    const asked = Promise.allSettled([pauses.pause("", undefined), pauses.resume()]);
    const lost = new SessionLost("gone", { reason: "SESSION_LOST" });
    pauses.end(lost);
    assert.deepEqual(
      (await asked).map((each) => each.status === "rejected" && each.reason),
      [lost, lost],
    );
  });
});
