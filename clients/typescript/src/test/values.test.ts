/** Numbers, words, errors and completions to and from what travels. */

import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { Completion } from "../completions.js";
import {
  InvalidArgument,
  type NotFound,
  PenstockError,
  ResourceExhausted,
  Unavailable,
  Unsupported,
} from "../errors.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { PhaseSchema } from "../gen/penstock/driver/v1/rollout_pb.js";
import { ModeSchema } from "../gen/penstock/interception/v1/interception_pb.js";
import { CallClass, TrajectorySchema } from "../gen/penstock/trajectory/v1/trajectory_pb.js";
import { trajectoryFrom } from "../results.js";
import { Backoff, pause } from "../rpc.js";
import { fromTransport } from "../statuses.js";
import { specOf } from "../tasks.js";
import { bytesOf, duration, logprobs, milliseconds, number, tokenIds, word } from "../wire.js";

describe("arrays", () => {
  it("are the same after the way, wherever they lie in what carried them", () => {
    const ids = Int32Array.of(0, 1, 2 ** 31 - 1);
    const probabilities = Float32Array.of(-0, -1.401298464324817e-45, -3.4028234663852886e38, Number.NaN);
    for (let offset = 0; offset < 4; offset++) {
      const frame = new Uint8Array(64);
      frame.set(bytesOf(ids), offset);
      assert.deepEqual(tokenIds(frame.subarray(offset, offset + 12)), ids);
      frame.set(bytesOf(probabilities), offset);
      assert.deepEqual(logprobs(frame.subarray(offset, offset + 16)), probabilities);
    }
    assert.deepEqual([...bytesOf(Int32Array.of(1, 256))], [1, 0, 0, 0, 0, 1, 0, 0]);
    assert.deepEqual([...bytesOf(ids.subarray(1, 2))], [1, 0, 0, 0]);
  });
});

describe("times and words", () => {
  it("keep what they say", () => {
    for (const value of [0, 1, 1500, 0.25, 86_400_000, 1234.5]) {
      const travelled = duration(value);
      assert.equal(travelled && Number(travelled.seconds) * 1000 + travelled.nanos / 1e6, value);
    }
    assert.equal(duration(undefined), undefined);
    assert.equal(milliseconds(undefined), undefined);
    assert.deepEqual([word(PhaseSchema, 4), word(PhaseSchema, 99)], ["setting_up", "99"]);
    assert.equal(word(ModeSchema, number(ModeSchema, "black_box")), "black_box");
    assert.throws(() => number(ModeSchema, "blackbox"), /'blackbox' is not one of black_box, transparent_proxy/);
  });
});

describe("a completion", () => {
  it("holds what was sampled, by one version", () => {
    const made = Completion.ofTokens([5, 6], [-1, -0.5], { policyVersion: 3, finishReason: "length" });
    assert.deepEqual([made.tokenIds, made.logprobs], [Int32Array.of(5, 6), Float32Array.of(-1, -0.5)]);
    assert.deepEqual(
      made.message.span?.versions.map((item) => [item.policyVersion, item.start, item.end]),
      [[3n, 0, 2]],
    );
    assert.equal(Completion.ofTokens([1]).logprobs, undefined);
    assert.equal(Completion.ofText("no tokens").message.span, undefined);
  });

  it("is refused when its arrays are not what they have to be", () => {
    assert.throws(() => Completion.ofTokens([1, 2], [-1]), { reason: "COMPLETION_SHAPE" });
    for (const id of [-1, 0.5, 2 ** 31, Number.NaN]) {
      assert.throws(() => Completion.ofTokens([id]), { reason: "TOKEN_IDS" });
    }
  });
});

describe("a spec", () => {
  it("says what was given and leaves the rest unset", () => {
    const spec = specOf({ taskId: "t", instruction: "i", setup: [{ argv: ["true"] }, "x"] }, "shell", {
      budgets: { maxCalls: 0 },
    });
    assert.deepEqual([spec.budgets?.maxCalls, spec.budgets?.maxTotalTokens], [0, undefined]);
    assert.deepEqual([spec.runId, spec.limits, spec.task?.verifier], [undefined, undefined, undefined]);
    assert.deepEqual(
      spec.task?.setup.map((item) => item.command.case),
      ["argv", "shell"],
    );
    assert.throws(() => specOf({ taskId: "t", instruction: "i", setup: [{} as never] }, "shell", {}), InvalidArgument);
  });

  it("has the models that answer its calls, each with its policy", () => {
    const { models } = specOf({ taskId: "t", instruction: "i" }, "shell", {
      models: [
        { policyId: "teacher", source: { inference: "big" }, trained: false, calls: { fromIndex: 1, callClasses: ["title"] } },
        { policyId: "student", policy: { maxStaleness: 3 } },
      ],
    });
    assert.deepEqual(
      models.map(({ policyId, trained, source }) => [policyId, trained, source?.source.case]),
      [
        ["teacher", false, "inference"],
        ["student", undefined, undefined],
      ],
    );
    assert.deepEqual([models[0]?.calls?.fromIndex, models[0]?.calls?.untilIndex], [1, undefined]);
    assert.deepEqual(models[0]?.calls?.callClasses, [CallClass.TITLE]);
    assert.deepEqual([models[1]?.policy?.maxStaleness, models[1]?.calls], [3n, undefined]);
    const wrong = { policyId: "a", calls: { callClasses: ["titles" as never] } };
    assert.throws(() => specOf({ taskId: "t", instruction: "i" }, "shell", { models: [wrong] }), /'titles' is not one of/);
  });
});

describe("an error", () => {
  function wire(code: Code, ...details: ConnectError["details"]): ConnectError {
    const error = new ConnectError("said", code);
    error.isWireError = true;
    error.details = details;
    return error;
  }

  it("has what the service said of it", () => {
    const error = fromTransport(
      wire(
        Code.ResourceExhausted,
        { desc: ErrorInfoSchema, value: create(ErrorInfoSchema, { reason: "QUEUE_FULL", metadata: { a: "b" } }) },
        {
          desc: BadRequestSchema,
          value: create(BadRequestSchema, { fieldViolations: [{ field: "n", description: "too many" }] }),
        },
        { desc: RetryInfoSchema, value: create(RetryInfoSchema, { retryDelay: { seconds: 1n, nanos: 5e8 } }) },
      ),
      "the driver",
    );
    assert(error instanceof ResourceExhausted && error instanceof PenstockError && error instanceof Error);
    assert.deepEqual(
      [error.name, error.message, error.reason, error.metadata, error.retryAfterMs],
      ["ResourceExhausted", "said (n: too many)", "QUEUE_FULL", { a: "b" }, 1500],
    );
  });

  it("without a word of the service says what to do", () => {
    const away = fromTransport(new ConnectError("ECONNREFUSED", Code.Unavailable), "the driver at x");
    assert(away instanceof Unavailable && away.reason === "TRANSPORT_UNAVAILABLE");
    assert.match(away.message, /Cannot reach the driver at x. Is it running\? `penstock up`/);
    assert(fromTransport(new ConnectError("reset", Code.Aborted), "x") instanceof Unavailable);
    const old = fromTransport(wire(Code.Unimplemented), "the driver at x");
    assert(old instanceof Unsupported && old.message === "This is not implemented by the driver at x: said");
    assert.equal((fromTransport(wire(Code.NotFound), "x") as NotFound).reason, "TRANSPORT_NOT_FOUND");
    assert.equal((fromTransport(wire(Code.Canceled), "x") as PenstockError).reason, "TRANSPORT_CANCELLED");
  });

  it("of a token that is not taken names the service and where the token is from", () => {
    const sent = { origin: "a file", advice: () => "Take another." };
    const refused = fromTransport(wire(Code.Unauthenticated), "the driver at x", sent) as PenstockError;
    assert.equal(refused.message, "said, says the driver at x. Take another.");
    const info = create(ErrorInfoSchema, { reason: "ROLE_NOT_ALLOWED" });
    const role = fromTransport(wire(Code.PermissionDenied, { desc: ErrorInfoSchema, value: info }), "x", sent);
    assert.equal((role as PenstockError).message, "said The token that was sent is from a file.");
    assert.equal((fromTransport(wire(Code.NotFound), "x", sent) as PenstockError).message, "said");
  });

  it("of the program itself stays what it is", () => {
    const error = new TypeError("a fault");
    assert.equal(fromTransport(error, "x"), error);
  });
});

describe("waiting", () => {
  it("grows to a bound, with jitter, and does as it is told", () => {
    const backoff = new Backoff();
    const delays = Array.from({ length: 20 }, () => backoff.next());
    delays.forEach((delay, index) => {
      const ceiling = Math.min(5000, 100 * 2 ** index);
      assert(delay >= ceiling / 2 && delay <= ceiling);
    });
    assert.equal(backoff.next(new Unavailable("x", { reason: "X", retryAfterMs: 9000 })), 9000);
    backoff.reset();
    assert(backoff.next() <= 100);
  });

  it("ends with the signal's own reason", async () => {
    const reason = new Error("enough");
    await assert.rejects(pause(60_000, AbortSignal.abort(reason)), reason);
    const controller = new AbortController();
    const waiting = pause(60_000, controller.signal);
    controller.abort(reason);
    await assert.rejects(waiting, reason);
  });
});

describe("a trajectory", () => {
  it("is put together from its fragments", () => {
    const part = (rolloutId: string, sampleId: string) =>
      create(TrajectorySchema, { rolloutId, samples: [{ sampleId, inputIds: bytesOf(Int32Array.of(7)) }] });
    const whole = trajectoryFrom([part("r", "1"), part("", "2")]);
    assert.equal(whole.rolloutId, "r");
    assert.deepEqual(
      whole.samples.map((sample) => [sample.sampleId, [...sample.inputIds], sample.logprobs]),
      [
        ["1", [7], undefined],
        ["2", [7], undefined],
      ],
    );
  });
});
