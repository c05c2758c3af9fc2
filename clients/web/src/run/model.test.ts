import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { FailureCause, Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { type Row, rowOf } from "../overview/board";
import { comparedTasks, pairedRuns } from "./comparison";
import { gapPoints } from "./gaps";
import { filterOf, lineOf, MEASURES, MOST_POINTS, parseRef, pointsOf, refOf, rowsOf, runsOf, usualAxis } from "./model";

let count = 0;

function row(more: { run?: string; namespace?: string; step?: string; version?: number; group?: string; reward?: number; end?: number; cause?: FailureCause; task?: string } = {}): Row {
  count += 1;
  const { end, reward, version } = more;
  return rowOf(
    create(RolloutSummarySchema, {
      ...{ rolloutId: String(count), taskId: more.task ?? "t", agent: "shell", runId: more.run ?? "", namespace: more.namespace ?? "" },
      ...{ labels: more.step === undefined ? {} : { step: more.step }, createTime: timestampFromMs(1000), index: count },
      ...(more.group === undefined ? {} : { groupId: more.group }),
      ...(end === undefined ? { phase: Phase.RUNNING } : { phase: Phase.ENDED, endTime: timestampFromMs(end) }),
      ...(reward === undefined ? {} : { reward: { value: reward, rangeMin: 0, rangeMax: 1 } }),
      ...(more.cause === undefined ? {} : { failure: { cause: more.cause } }),
      calls: { calls: 2, completionTokens: 10n, ...(version === undefined ? {} : { oldestPolicyVersion: BigInt(version), newestPolicyVersion: BigInt(version + 1) }) },
    }),
  );
}

const measure = (key: string) => {
  const found = MEASURES.find((one) => one.key === key);
  if (!found) throw new Error(key);
  return found;
};

describe("a run", () => {
  test("has figures over its rollouts", () => {
    const rows = [
      row({ run: "a", reward: 1, end: 61_000, version: 3 }),
      row({ run: "a", reward: 0, end: 121_000, version: 5 }),
      row({ run: "a", end: 121_000, cause: FailureCause.BUDGET }),
      row({ run: "a", end: 2000, cause: FailureCause.CANCELLED }),
      row({ run: "a" }),
      row(),
      row({ run: "b" }),
    ];
    const [found, other, ...more] = runsOf(rows);
    expect(found).toMatchObject({ ref: "a", live: 1, completed: 2, failed: 1, cancelled: 1, graded: 2, calls: 10, tokens: 50, tasks: 1, versions: [3, 6], first: 1000, last: 121_000 });
    // One task: Wilson's interval of 1 in 2.
    expect(found?.reward).toMatchObject({ value: 0.5, count: 2 });
    expect(found?.reward?.low).toBeCloseTo(0.0945, 4);
    expect(found?.perMinute).toBeCloseTo((3 * 60_000) / 119_000);
    expect(other).toMatchObject({ ref: "b", reward: null, perMinute: null, versions: null });
    expect(more).toEqual([]);
  });

  test("of another namespace is another run", () => {
    const rows = [row({ run: "a" }), row({ run: "a", namespace: "team-a" })];
    expect(runsOf(rows).map((run) => run.ref).sort()).toEqual(["a", "team-a:a"]);
    expect(rowsOf(rows, "team-a:a")).toEqual([rows[1]]);
    expect(rows.map(refOf).map(parseRef)).toEqual([
      { id: "a", namespace: "default" },
      { id: "a", namespace: "team-a" },
    ]);
    expect([filterOf("a"), filterOf("team-a:a", "label:step=3")]).toEqual(["run:a", "run:a namespace:team-a label:step=3"]);
  });
});

test("two runs are compared task by task, the largest difference first", () => {
  const earned = (run: string, task: string, ...rewards: number[]) => rewards.map((reward) => row({ run, task, reward, end: 2000 }));
  const rows = [...earned("a", "same", 1, 0), ...earned("b", "same", 0, 1), ...earned("a", "better", 0, 0, 0), ...earned("b", "better", 1, 1, 1), ...earned("a", "gone", 1), row({ run: "b", task: "new" })];
  const runs = new Map(runsOf(rows).map((run) => [run.ref, run]));
  const [left, right] = [runs.get("a"), runs.get("b")];
  if (!left || !right) throw new Error("both are there");
  const found = comparedTasks(left, right);
  expect(found.map(({ task, more }) => [task, more?.value ?? null])).toEqual([
    ["better", 1],
    ["same", 0],
    ["gone", null],
    ["new", null],
  ]);
  expect(found[0]?.more?.low).toBeGreaterThan(0);
  expect(found[1]?.more?.low).toBeLessThan(0);
  expect([found[2]?.right, found[3]?.left]).toEqual([null, null]);
});

test("two runs are compared over the tasks that both have graded rollouts of, as tasks and not as rollouts", () => {
  const rows = [
    // Each run solves what the other does and one task more, of very different tasks: as independent runs they would be alike.
    ...["a", "b", "c", "d", "e", "f"].flatMap((task, index) => [
      ...Array.from({ length: 4 }, (_, attempt) => row({ run: "first", task, reward: Number(attempt < index % 4), end: 2000 })),
      ...Array.from({ length: 4 }, (_, attempt) => row({ run: "second", task, reward: Number(attempt <= index % 4), end: 2000 })),
    ]),
    row({ run: "first", task: "ungraded" }),
    row({ run: "second", task: "ungraded", reward: 1, end: 2000 }),
    row({ run: "third", task: "a", reward: 1, end: 2000 }),
  ];
  const runs = new Map(runsOf(rows).map((run) => [run.ref, run]));
  const [first, second, third] = ["first", "second", "third"].map((ref) => runs.get(ref));
  if (!first || !second || !third) throw new Error("all are there");
  expect(pairedRuns(first, second)).toEqual({ value: 0.25, interval: null, p: 1 / 32, tasks: 6 });
  expect(pairedRuns(second, first)).toEqual({ value: -0.25, interval: null, p: 1 / 32, tasks: 6 });
  expect(pairedRuns(first, third)).toBeNull();
});

describe("the sampled entropy of a token", () => {
  const entropy = (...rollouts: (readonly [sum: number, tokens: number])[]) =>
    measure("entropy").of(rollouts.map(([logprobSum, tokens]) => rowOf(create(RolloutSummarySchema, { calls: { logprobSum, logprobCount: BigInt(tokens), completionTokens: 99n } }))));

  test("is the mean of minus the logprobs, each token with one weight", () => {
    const found = entropy([-30, 10], [-10, 30]);
    expect(found).toMatchObject({ value: 1, count: 2 });
    // Of a ratio of means: the residuals are (30 - 10) / 20 and (10 - 30) / 20.
    expect(found?.high).toBeCloseTo(1 + 1.959963984540054, 12);
    expect(found?.low).toBe(0);
    expect(entropy([-5, 10], [-50, 100])).toEqual({ value: 0.5, low: 0.5, high: 0.5, count: 2 });
    expect(entropy([0, 10])).toEqual({ value: 0, low: 0, high: 0, count: 1 });
  });

  test("is of the rollouts whose tokens have logprobs alone", () => {
    expect(entropy([-5, 10], [0, 0])).toMatchObject({ value: 0.5, count: 1 });
    expect(entropy([0, 0])).toBeNull();
    expect(measure("entropy").of([rowOf(create(RolloutSummarySchema, {}))])).toBeNull();
  });
});

describe("the points of a run", () => {
  test("are by step where each run has several, else by version, else by group", () => {
    const steps = [row({ step: "1", version: 1 }), row({ step: "10", version: 1 })];
    const versions = [row({ version: 1 }), row({ version: 2 })];
    expect([usualAxis([steps]), usualAxis([versions]), usualAxis([steps, versions]), usualAxis([[row()]]), usualAxis([])]).toEqual(["step", "version", "group", "group", "group"]);
    expect(pointsOf([...steps, row({ step: "x" }), row({ step: "1" })], "step").map(({ x, rows }) => [x, rows.length])).toEqual([
      [1, 2],
      [10, 1],
    ]);
  });

  test("are groups in the order in which they began, or every eight rollouts in the order of their ends", () => {
    expect(pointsOf([row({ group: "a" }), row({ group: "b" }), row({ group: "a" })], "group").map(({ rows }) => rows.length).sort()).toEqual([1, 2]);
    const alone = Array.from({ length: 9 }, (_, index) => row({ end: 9000 - index }));
    expect(pointsOf(alone, "group").map(({ rows }) => rows.map((one) => one.ended))).toEqual([[8992, 8993, 8994, 8995, 8996, 8997, 8998, 8999], [9000]]);
  });

  test("are bounded, and none is lost", () => {
    const rows = Array.from({ length: 1000 }, (_, index) => row({ step: String(index) }));
    const found = pointsOf(rows, "step");
    expect(found.length).toBeLessThanOrEqual(MOST_POINTS);
    expect(found.flatMap((point) => point.rows)).toHaveLength(1000);
    expect(found.at(-1)?.x).toBe(999);
  });
});

describe("a line", () => {
  const points = [0, 1, 1, 1].map((reward, x) => ({ x, rows: [row({ reward, end: 2000 + x }), row({ reward: 0, end: 3000 })] }));

  test("is of what counts together, with the interval of that", () => {
    const plain = lineOf(points, measure("reward"), 1);
    expect(plain.map((point) => point.mean.value)).toEqual([0, 0.5, 0.5, 0.5]);
    const smooth = lineOf(points, measure("reward"), 2);
    expect(smooth.map((point) => [point.mean.value, point.mean.count, point.own])).toEqual([
      [0, 2, 0],
      [0.25, 4, 0.5],
      [0.5, 4, 0.5],
      [0.5, 4, 0.5],
    ]);
    const width = (of: typeof plain) => (of[3]?.mean.high ?? 0) - (of[3]?.mean.low ?? 0);
    expect(width(smooth)).toBeLessThan(width(plain));
  });

  test("of a rate is the mean of the rates of its points: the time between them is no throughput", () => {
    const apart = [row({ end: 2000 }), row({ end: 61_000 })].map((one, x) => ({ x, rows: [one] }));
    expect(lineOf(apart, measure("rate"), 2).map((point) => point.mean.value)).toEqual([60, 30.5]);
  });

  test("leaves out points that have nothing of it", () => {
    expect(lineOf([{ x: 1, rows: [row()] }, { x: 2, rows: [row({ reward: 1, end: 2000 })] }], measure("reward"), 1).map((point) => point.x)).toEqual([2]);
  });

  test.each([
    ["failed", 0.5],
    ["calls", 2],
    ["tokens", 10],
    ["time", 1500],
    ["rate", 60],
    ["solved", 1],
  ])("of %s is %d", (key, value) => {
    const rows = [row({ reward: 1, end: 2000 }), row({ end: 3000, cause: FailureCause.BUDGET }), row()];
    expect(measure(key).of(rows)?.value).toBeCloseTo(value);
  });

  test("has its mean inside its band, whatever the rollouts earned", () => {
    fc.assert(
      fc.property(fc.array(fc.array(fc.integer({ min: 0, max: 1 }), { maxLength: 4 }), { maxLength: 8 }), fc.integer({ min: 1, max: 5 }), (steps, window) => {
        const found = lineOf(steps.map((rewards, x) => ({ x, rows: rewards.map((reward) => row({ reward, end: 2000 })) })), measure("reward"), window);
        for (const { mean } of found) expect(mean.low <= mean.value && mean.value <= mean.high && mean.low >= 0 && mean.high <= 1).toBe(true);
      }),
    );
  });
});

test("gaps are those of the runs' versions, oldest first", () => {
  const gap = (version: number, meanAbs: number) => ({ policyVersion: BigInt(version), tokens: 10n, meanAbs });
  expect(gapPoints([gap(3, 0.3), gap(1, 0.1), gap(2, 0.2)], [2, 7]).map(({ x, own, mean }) => [x, own, mean.count])).toEqual([
    [2, 0.2, 10],
    [3, 0.3, 10],
  ]);
  expect(gapPoints([gap(1, 0.1)], null)).toEqual([]);
});
