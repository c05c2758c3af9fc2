import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { describe, expect, test } from "vitest";

import { type Row, rowOf } from "../overview/board";
import { agentOf, type Pair, pairOf, typicalOf, versionSlices, versionsPlace, versionWords, withRollout, withVersion } from "./versions";

let count = 0;

/** A rollout that began with one version and ended with another; each is newer than those before. */
function row(versions: readonly [number, number] | null, reward: number | null, more: { run?: string; namespace?: string; agent?: string } = {}): Row {
  count += 1;
  return rowOf(
    create(RolloutSummarySchema, {
      ...{ rolloutId: `r${count}`, taskId: "t", agent: more.agent ?? "shell", runId: more.run ?? "a", namespace: more.namespace ?? "", phase: Phase.ENDED },
      ...{ createTime: timestampFromMs(1000 * count), endTime: timestampFromMs(1000 * count + 1) },
      ...(reward === null ? {} : { reward: { value: reward, rangeMin: 0, rangeMax: 1 } }),
      calls: versions ? { calls: 1, oldestPolicyVersion: BigInt(versions[0]), newestPolicyVersion: BigInt(versions[1]) } : { calls: 0 },
    }),
  );
}

const ids = (pair: Pair | undefined) => pair?.map(({ id }) => id);

describe("a task's rollouts by policy version", () => {
  test("count once, at the version that they began with, and not without one", () => {
    const found = versionSlices([row([3, 5], 1), row([3, 3], 0), row([5, 5], 1), row(null, null)]);
    expect(found.map(({ version, rows, graded, solved }) => [version, rows.length, graded, solved?.value])).toEqual([
      [3, 2, 2, 0.5],
      [5, 1, 1, 1],
    ]);
    expect(versionWords({ versions: [3, 5] })).toBe("versions 3–5");
  });

  test("are those of one run: the same number in another run or namespace is another version", () => {
    const rows = [row([1, 1], 0, { run: "old" }), row([1, 1], 0, { run: "a", namespace: "team" }), row([2, 2], 0), row([1, 1], 1)];
    expect(versionSlices(rows).map(({ run, version }) => [run, version])).toEqual([
      ["a", 1],
      ["a", 2],
      ["team:a", 1],
      ["old", 1],
    ]);
  });

  test("are of the agent that is asked for, or that of a rollout in the address, or the usual one", () => {
    const rows = [row([1, 1], 0), row([1, 1], 0), row([1, 1], 0, { agent: "codex" })];
    expect(agentOf(rows, "codex", [])).toBe("codex");
    expect(agentOf(rows, "gone", [null, rows[2]?.id ?? ""])).toBe("codex");
    expect(agentOf(rows, null, [null, "gone"])).toBe("shell");
    expect(agentOf([], null, [])).toBe("");
  });

  test("are reached by an address without what is not given", () => {
    expect(versionsPlace("a/b", { run: "x", agent: "", left: "r1" })).toBe("#/tasks/a%2Fb/versions?run=x&left=r1");
    expect(versionsPlace("t")).toBe("#/tasks/t/versions");
  });
});

describe("two rollouts side by side", () => {
  test("are typical ones of the oldest and the newest version of the newest run", () => {
    const [low, high, mid, late] = [row([1, 1], 0), row([1, 1], 1), row([1, 1], 0.6), row([4, 4], 1)];
    row([9, 9], 1, { run: "old" });
    expect(typicalOf([low, high, mid])).toBe(mid);
    expect(ids(pairOf(versionSlices([low, high, mid, late]), null, null))).toEqual([mid.id, late.id]);
    expect(ids(pairOf(versionSlices([low, late]), "gone", null))).toEqual([low.id, late.id]);
  });

  test("are the two that are asked for, and beside one alone there is another version", () => {
    const [first, second, third] = [row([1, 1], 0), row([2, 2], 0), row([3, 3], 0)];
    const slices = versionSlices([first, second, third]);
    expect(ids(pairOf(slices, second.id, first.id))).toEqual([second.id, first.id]);
    expect(ids(pairOf(slices, second.id, null))).toEqual([second.id, third.id]);
    expect(ids(pairOf(slices, third.id, null))).toEqual([third.id, first.id]);
    expect(ids(pairOf(slices, null, third.id))).toEqual([first.id, third.id]);
    expect(ids(pairOf(slices, third.id, third.id))).toEqual([third.id, first.id]);
  });

  test("are of two runs where each has one version, and none where there is one version only", () => {
    const [old, late] = [row([5, 5], 0, { run: "eval-5" }), row([9, 9], 1, { run: "eval-9" })];
    expect(ids(pairOf(versionSlices([old, late]), null, null))?.sort()).toEqual([old.id, late.id].sort());
    expect(pairOf(versionSlices([row([5, 5], 0), row([5, 5], 1)]), null, null)).toBeUndefined();
    expect(pairOf([], null, null)).toBeUndefined();
  });

  test("never become one: what is on the other side already changes places", () => {
    const [first, second, other] = [row([1, 1], 0), row([2, 2], 0), row([2, 2], 1)];
    const [one, two] = versionSlices([first, second, other]);
    const pair: Pair = [first, second];
    expect(ids(withRollout(pair, 0, second))).toEqual([second.id, first.id]);
    expect(ids(withRollout(pair, 1, other))).toEqual([first.id, other.id]);
    expect(one && ids(withVersion(pair, 1, one))).toEqual([second.id, first.id]);
    expect(two && ids(withVersion(pair, 0, two))).toEqual([other.id, second.id]);
  });
});
