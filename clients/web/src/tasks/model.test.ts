import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { FailureCause, Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { describe, expect, test } from "vitest";

import { type Row, rowOf } from "../overview/board";
import { sliceOf, slicesOf } from "./model";

let count = 0;

/** A rollout that ended after so many milliseconds with a reward from -1 to 1; null = not graded. */
function row(taskId: string, value: number | null, more: { agent?: string; ms?: number; cause?: FailureCause; calls?: number } = {}): Row {
  count += 1;
  return rowOf(
    create(RolloutSummarySchema, {
      ...{ rolloutId: String(count), taskId, agent: more.agent ?? "shell", phase: Phase.ENDED },
      ...{ createTime: timestampFromMs(1000), endTime: timestampFromMs(1000 + (more.ms ?? 0)) },
      ...(value === null ? {} : { reward: { value, rangeMin: -1, rangeMax: 1 } }),
      ...(more.cause === undefined ? {} : { failure: { cause: more.cause } }),
      calls: { calls: more.calls ?? 0 },
    }),
  );
}

const standing = (...rewards: (number | null)[]) => sliceOf("t", rewards.map((value) => row("t", value)), "task").standing;

describe("a task", () => {
  test("is always solved, never, or now and then", () => {
    expect([standing(1, 1), standing(-1, -1), standing(-1, 1), standing(0, 0)]).toEqual(["always 1", "always 0", "mixed", "mixed"]);
    expect([standing(1), standing(), standing(null, null)]).toEqual(["one", "none", "none"]);
  });

  test("has a rate over those that are graded, and times of those that were not cancelled", () => {
    const rows = [row("t", 1, { ms: 10, calls: 2 }), row("t", -1, { ms: 30, calls: 4 }), row("t", null, { ms: 50, calls: 6, cause: FailureCause.BUDGET }), row("t", null, { ms: 9000, cause: FailureCause.CANCELLED })];
    const found = sliceOf("t", rows, "task");
    expect(found).toMatchObject({ graded: 2, failed: 1, live: 0, time: 30, calls: 4, others: 1 });
    expect(found.solved).toMatchObject({ value: 0.5, count: 2 });
    expect(found.reward?.value).toBe(0);
  });
});

test("an agent's interval is over tasks: many rollouts of one task are no evidence about others", () => {
  const rows = [...Array.from({ length: 40 }, () => row("a", 1)), row("b", -1), row("c", 1)];
  const [found] = slicesOf(rows, "agent");
  expect(found).toMatchObject({ key: "shell", others: 3, graded: 42 });
  expect(found?.solved?.value).toBeCloseTo(2 / 3);
  expect(found?.solved?.low).toBeLessThan(0.3);
});

test("tasks are in the order in which something happened last", () => {
  expect(slicesOf([row("old", 1, { ms: 1 }), row("new", 1, { ms: 2 }), row("old", 0)], "task").map((slice) => slice.key)).toEqual(["new", "old"]);
});
