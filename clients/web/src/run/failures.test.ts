import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { FailureCause, Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { expect, test } from "vitest";

import { type Row, rowOf } from "../overview/board";
import { reasonLines, reasonsOf, reasonWords } from "./failures";

let count = 0;

function row(reason: string | null, cause = FailureCause.AGENT): Row {
  count += 1;
  return rowOf(
    create(RolloutSummarySchema, {
      ...{ rolloutId: String(count), taskId: "t", agent: "shell", phase: Phase.ENDED, endTime: timestampFromMs(2000) },
      ...(reason === null ? {} : { failure: { cause, reason } }),
    }),
  );
}

const rows = (...reasons: (string | null)[]): Row[] => reasons.map((reason) => row(reason));

test("reasons are counted, the most frequent first, without what was cancelled", () => {
  const found = [...rows("B", "A", "A", "C", "D", "D", "E", null), row("X", FailureCause.CANCELLED), row("", FailureCause.TIMEOUT)];
  expect(reasonsOf(found).slice(0, 3)).toEqual([
    ["A", 2],
    ["D", 2],
    ["B", 1],
  ]);
  expect(reasonWords(found)).toBe("2 A, 2 D, 1 B, 3 for other reasons");
  expect(reasonsOf([row("", FailureCause.TIMEOUT)])).toEqual([["timeout", 1]]);
  expect(reasonWords(rows(null))).toBe("");
});

test("each frequent reason is a line of shares of what ended, and the others are one", () => {
  const points = [
    { x: 1, rows: rows("A", "A", null, null) },
    { x: 2, rows: rows("A", "B", "C", "D") },
    { x: 3, rows: [...rows(null), row("X", FailureCause.CANCELLED)] },
  ];
  const lines = reasonLines(points, 1);
  expect(lines.map(({ name, points: found }) => [name, ...found.map(({ own }) => own)])).toEqual([
    ["A", 0.5, 0.25, 0],
    ["B", 0, 0.25, 0],
    ["C", 0, 0.25, 0],
    ["other reasons", 0, 0.25, 0],
  ]);
  // Pooled with the point before: the interval is of all their rollouts.
  expect(reasonLines(points, 2)[0]?.points[1]?.mean).toMatchObject({ value: 3 / 8, count: 8 });
  expect(reasonLines([{ x: 1, rows: rows("A", null) }], 1).map(({ name }) => name)).toEqual(["A"]);
  expect(reasonLines([{ x: 1, rows: rows(null) }], 1)).toEqual([]);
});
