import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { describe, expect, test } from "vitest";

import { lineOf, MEASURES, pointsOf, type LinePoint } from "../run/model";
import { rowsPlace } from "../run/places";
import { usualWindow, windowOf } from "../run/smoothing";
import { type Row, rowOf } from "./board";
import { curvesOf } from "./curves";

let count = 0;

function row(run: string, reward: number | null, more: { step?: number; group?: string; end?: number } = {}): Row {
  count += 1;
  return rowOf(
    create(RolloutSummarySchema, {
      ...{ rolloutId: String(count), taskId: `t${count % 3}`, agent: "shell", runId: run, phase: Phase.ENDED, endTime: timestampFromMs(more.end ?? 1000 + count) },
      ...(more.step === undefined ? {} : { labels: { step: String(more.step) } }),
      ...(more.group === undefined ? {} : { groupId: more.group }),
      ...(reward === null ? {} : { reward: { value: reward, rangeMin: 0, rangeMax: 1 } }),
    }),
  );
}

const steps = (run: string, many: number): Row[] => Array.from({ length: many * 4 }, (_, index) => row(run, index % 2, { step: index >> 2, group: `${run}-${index >> 1}` }));

describe("the curve of the first page", () => {
  test("is that of the run's own page: by step, with the interval of its mean", () => {
    const rows = steps("a", 5);
    const [measure] = MEASURES;
    if (!measure) throw new Error("the reward is one");
    const { axis, lines } = curvesOf(rows);
    expect(axis).toBe("step");
    expect(lines).toEqual([{ ref: "a", points: lineOf(pointsOf(rows, "step"), measure, 1) }]);
    // Half of the binary rewards are 1: from the least to the most would be 0 to 1 at each point.
    for (const { mean } of lines[0]?.points ?? []) expect(mean).toSatisfy(({ low, high }: LinePoint["mean"]) => 0 < low && low < 0.5 && 0.5 < high && high < 1);
  });

  test("pools points where there are many, unless another number is chosen", () => {
    const rows = steps("a", 60);
    expect(curvesOf(rows)).toMatchObject({ window: 3, usual: 3 });
    expect(curvesOf(rows).lines[0]?.points.at(-1)?.mean.count).toBe(12);
    expect(curvesOf(rows, (usual) => windowOf(new URLSearchParams("smooth=1"), usual))).toMatchObject({ window: 1, usual: 3 });
    expect([0, 19, 20, 60, 99, 100, 300, 1000].map(usualWindow)).toEqual([1, 1, 1, 3, 3, 5, 10, 25]);
  });

  test("has a line for each of the newest runs, and never two runs in one point", () => {
    const rows = ["old", "a", "b", "c", "d"].flatMap((run) => steps(run, 2));
    const ungraded = row("newest", null);
    const { lines } = curvesOf([...rows, ungraded, row("", 1)]);
    expect(lines.map(({ ref }) => ref)).toEqual(["d", "c", "b", "a"]);
    for (const { ref, points } of lines) for (const point of points) expect(point.rows.every((one) => one.run === ref)).toBe(true);
  });

  test("of rollouts without a run is one line, by group where they have groups", () => {
    const rows = [row("", 0, { group: "g" }), row("", 1, { group: "g" }), row("", 1, { group: "h" })];
    const { axis, lines } = curvesOf(rows);
    expect([axis, lines.length, lines[0]?.ref]).toEqual(["group", 1, ""]);
    expect(lines[0]?.points.map(({ own }) => own)).toEqual([0.5, 1]);
    expect(curvesOf([row("", null)]).lines).toEqual([]);
    expect(curvesOf([]).lines).toEqual([]);
  });

  test("leads to the rollouts of a point", () => {
    const point = (rows: readonly Row[]): LinePoint => ({ x: 0, own: 0, mean: { value: 0, low: 0, high: 0, count: 0 }, rows });
    const [one, other] = [row("a", 1, { step: 3, group: "g" }), row("a", 1, { step: 4, group: "h" })];
    expect(rowsPlace("a", "step", point([one]))).toBe("/?q=run%3Aa+label%3Astep%3D3");
    expect(rowsPlace("a", "step", point([one, other]))).toBe("/?q=run%3Aa");
    expect(rowsPlace("a", "group", point([one]))).toBe("/groups/g");
    expect(rowsPlace("", "step", point([one]))).toBe("/?q=label%3Astep%3D3");
    expect(rowsPlace("", "group", point([one, other]))).toBe("/");
    expect(rowsPlace("a", "step", point([one]), "agent:codex")).toBe("/?q=agent%3Acodex+run%3Aa+label%3Astep%3D3");
    expect(rowsPlace("a", "step", point([one]), "run:a")).toBe("/?q=run%3Aa+label%3Astep%3D3");
  });
});
