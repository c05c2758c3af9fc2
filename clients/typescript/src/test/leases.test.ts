/** The book of a session: what is handed out once, sent until it is acknowledged, and told to whoever waits. */

import assert from "node:assert/strict";
import { beforeEach, describe, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import type { ModelCall } from "../calls.js";
import { Completion } from "../completions.js";
import { AlreadyDelivered, CallEnded, InvalidCompletion, SessionLost } from "../errors.js";
import {
  CallResultSchema,
  ModelCallSchema,
  ResultRejected_Reason,
  ResultRejectedSchema,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";
import { Inbox, Leases, MAX_RESULT_BYTES } from "../leases.js";

const ANSWER = Completion.ofTokens([1, 2], [-1, -2]);

describe("the calls that a session holds", () => {
  let inbox: Inbox;
  let leases: Leases;
  let woken = 0;

  beforeEach(() => {
    woken = 0;
    inbox = new Inbox();
    leases = new Leases(() => woken++, inbox);
  });

  function lease(callId: string, leaseId = "first"): void {
    leases.leased(create(ModelCallSchema, { callId, leaseId, rolloutId: `rollout of ${callId}` }));
  }

  async function taken(callId = "a"): Promise<ModelCall> {
    lease(callId);
    const call = await inbox.nextCall();
    assert(call !== undefined);
    return call;
  }

  const sent = () => leases.nextResults()?.results.map((result) => [result.callId, result.leaseId]) ?? [];

  it("are handed out once, also when they are leased anew", async () => {
    const call = await taken();
    lease("a", "second");
    inbox.finish();
    assert.equal(await inbox.nextCall(), undefined);
    const delivering = call.deliver(ANSWER);
    assert.deepEqual(sent(), [["a", "second"]]);
    leases.accepted("a");
    await delivering;
    assert.deepEqual([call.ended, call.endReason, call.signal.aborted], [true, "ANSWERED", true]);
  });

  it("are answered again after a break until the gate says that it has the answer", async () => {
    const call = await taken();
    const delivering = call.deliver(ANSWER);
    assert.deepEqual([sent(), sent(), woken], [[["a", "first"]], [], 1]);
    leases.takenUp(new Set(["a"]));
    assert.deepEqual(sent(), [["a", "first"]]);
    leases.takenUp(undefined);
    lease("a", "third");
    assert.deepEqual(sent(), [["a", "third"]]);
    leases.accepted("a");
    leases.accepted("a");
    await delivering;
    assert.deepEqual(leases.callIds, []);
  });

  it("may be answered again after a refusal that is about the answer, and not after another", async () => {
    const call = await taken();
    const refused = call.deliver(ANSWER);
    leases.rejected(
      create(ResultRejectedSchema, {
        callId: "a",
        reason: ResultRejected_Reason.INVALID,
        violations: ["completion.span: must have tokens"],
      }),
    );
    await assert.rejects(refused, (error) => {
      assert(error instanceof InvalidCompletion && error.retryable);
      assert.deepEqual(error.violations, [{ field: "completion.span", description: "must have tokens" }]);
      return true;
    });
    const again = call.deliver(ANSWER);
    await assert.rejects(call.deliver(ANSWER), AlreadyDelivered);
    leases.rejected(create(ResultRejectedSchema, { callId: "a", reason: ResultRejected_Reason.CALL_ENDED }));
    await assert.rejects(again, CallEnded);
    await assert.rejects(call.deliver(ANSWER), CallEnded);
  });

  it("that were lost to others or closed are not waited for", async () => {
    const lost = await taken("a");
    const closed = await taken("b");
    lease("c");
    leases.takenUp(new Set(["b", "c"]));
    leases.closed(new Set(["rollout of b", "rollout of c"]));
    inbox.finish();
    assert.equal(await inbox.nextCall(), undefined); // c ended before anybody took it
    assert.deepEqual([lost.endReason, closed.endReason], ["LEASE_LOST", "ROLLOUT_CLOSED"]);
  });

  it("end with the session, and whoever waits is told", async () => {
    const call = await taken();
    const delivering = call.deliver(ANSWER);
    const waiting = inbox.nextCall();
    const error = new SessionLost("over", { reason: "SESSION_LOST" });
    leases.end(error);
    inbox.finish();
    await assert.rejects(delivering, error);
    assert.equal(await waiting, undefined);
    await assert.rejects(leases.answer(create(CallResultSchema, { callId: "a" })), error);
  });

  it("are waited for no longer than the caller's signal says", async () => {
    const controller = new AbortController();
    const waiting = inbox.nextCall(controller.signal);
    controller.abort(new Error("enough"));
    await assert.rejects(waiting, /enough/);
    assert.equal((await taken()).callId, "a");
  });

  it("take no answer that is larger than a frame may be", async () => {
    const call = await taken();
    const ids = new Int32Array(MAX_RESULT_BYTES / 4);
    await assert.rejects(call.deliver(Completion.ofTokens(ids)), { reason: "RESULT_TOO_LARGE" });
  });

  it("take no answer that has no form on the wire, and go on", async () => {
    const call = await taken();
    const broken = Completion.ofTokens([1], [-1], { samplingUsed: { maxTokens: 1.5 } });
    for (const answering of [call.deliver(broken), call.delegate({ sampling: { maxTokens: 1.5 } })]) {
      await assert.rejects(answering, (error) => {
        assert(error instanceof InvalidCompletion && error.retryable);
        assert.equal(error.reason, "RESULT_NOT_SENDABLE");
        return true;
      });
    }
    assert.deepEqual([sent(), woken], [[], 0]);
    const delivering = call.deliver(ANSWER);
    assert.deepEqual(sent(), [["a", "first"]]);
    leases.accepted("a");
    await delivering;
  });

  it("are answered in frames of bounded size", async () => {
    const ids = new Int32Array(1 << 20); // 4 MiB
    const delivering: Promise<void>[] = [];
    for (const callId of ["a", "b", "c"]) {
      delivering.push((await taken(callId)).deliver(Completion.ofTokens(ids)));
    }
    assert.deepEqual([sent().length, sent().length, sent().length], [1, 1, 1]);
    for (const callId of ["a", "b", "c"]) {
      leases.accepted(callId);
    }
    await Promise.all(delivering);
  });
});
