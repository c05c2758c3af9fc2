import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "@gen/google/rpc/error_details_pb";
import { describe, expect, test, vi } from "vitest";

import { servedWords } from "../services/served";
import { pushed, rate } from "../services/spark";
import { ticks } from "../ui/plot";
import { explain } from "./errors";
import { delay } from "./follow";
import { ago, bytes, compact, duration, reward } from "./format";

describe("words for errors", () => {
  test.each([
    [Code.Unauthenticated, "The token is invalid for this service", true],
    [Code.PermissionDenied, "This token may not watch the gate", true],
    [Code.Unimplemented, "The service is too old to watch the gate", true],
    [Code.Unavailable, "No answer: cannot watch the gate", false],
    [Code.DeadlineExceeded, "Too slow: cannot watch the gate", false],
    [Code.Internal, "Cannot watch the gate", false],
  ])("%s", (code, title, lasting) => {
    expect(explain(new ConnectError("said", code), "watch the gate")).toMatchObject({ title, lasting, said: "said" });
  });

  test.each([Code.Unavailable, Code.DeadlineExceeded, Code.ResourceExhausted])("only what is repeated is said to be: %s", (code) => {
    const error = new ConnectError("said", code);
    expect(explain(error, "watch the gate", true).todo).toMatch(/the page retries by itself/i);
    expect(explain(error, "cancel the rollout").todo).toMatch(/try again/i);
    expect(explain(error, "cancel the rollout").todo).not.toMatch(/by itself/i);
  });

  test("details are read: the reason, the fields, when to come again", () => {
    const error = new ConnectError("no", Code.InvalidArgument, undefined, [
      { desc: ErrorInfoSchema, value: create(ErrorInfoSchema, { reason: "FIELD_INVALID" }) },
      { desc: BadRequestSchema, value: { fieldViolations: [{ field: "size", description: "1 to 256" }] } },
      { desc: RetryInfoSchema, value: { retryDelay: { seconds: 2n, nanos: 500_000_000 } } },
    ]);
    expect(explain(error, "x")).toMatchObject({
      reason: "FIELD_INVALID",
      violations: [{ field: "size", description: "1 to 256" }],
      retryAfter: 2.5,
    });
  });

  test.each(["Failed to fetch", "NetworkError when attempting to fetch resource.", "Load failed", "network error"])("the page's own server is gone: %s", (said) => {
    vi.stubGlobal("location", { host: "127.0.0.1:7790" });
    const trouble = explain(new TypeError(said), "watch the rollouts", true);
    vi.unstubAllGlobals();
    expect(trouble).toMatchObject({ title: "The dashboard at 127.0.0.1:7790 does not answer: cannot watch the rollouts", said: "", lasting: false });
    expect(explain(new TypeError("x is undefined"), "watch the rollouts").title).toBe("Cannot watch the rollouts");
  });
});

test("delays grow to a cap, and lasting troubles are asked about less often", () => {
  const most = (attempt: number, lasting: boolean) => delay(attempt, lasting, () => 1);
  expect([0, 1, 2, 20].map((attempt) => most(attempt, false))).toEqual([400, 800, 1600, 10_000]);
  expect([0, 20].map((attempt) => most(attempt, true))).toEqual([5_000, 30_000]);
  expect(delay(3, false, () => 0)).toBe(1600);
});

test("what is served is named, as far as it is told", () => {
  expect(servedWords({ model: "tiny", engine: "numpy", engineVersion: "2.1" })).toBe("Model tiny, served by numpy 2.1");
  expect(servedWords({ model: "", engine: "scripted", engineVersion: "" })).toBe("Served by scripted");
  expect(servedWords({ model: "", engine: "", engineVersion: "" })).toBe("");
});

test("numbers are for people", () => {
  expect([0, 999, 1234, 5_600_000].map(compact)).toEqual(["0", "999", "1.2K", "5.6M"]);
  expect([0.5, 0.12345, 1].map(reward)).toEqual(["0.5", "0.123", "1"]);
  expect([840, 12_000, 200_000, 7_500_000].map(duration)).toEqual(["840 ms", "12 s", "3 min 20 s", "2 h 5 min"]);
  expect([4999, 59_999, 200_000, 7_500_000, 172_800_000].map(ago)).toEqual(["now", "59 s ago", "3 min ago", "2 h ago", "2 days ago"]);
  expect([512, 1536, 3 * 2 ** 30].map(bytes)).toEqual(["512 B", "1.5 KiB", "3 GiB"]);
});

test("a scale has few round values, from the least to the most", () => {
  expect(ticks(0, 1)).toEqual([0, 0.25, 0.5, 0.75, 1]);
  expect(ticks(-1, 3).length).toBeLessThan(8);
});

test("a counter's growth is told by second, and not across a restart", () => {
  expect(rate([0, 100], [2000, 300])).toBe(100);
  expect(rate(null, [0, 1])).toBeNull();
  expect(rate([0, 100], [1000, 5])).toBeNull();
  expect(pushed(Array.from({ length: 200 }, (_, index) => index), 7)).toHaveLength(120);
});
