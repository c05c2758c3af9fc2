import { create } from "@bufbuild/protobuf";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { FailureCause, Party, Phase, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { Board, listed, rowOf } from "./board";
import { matches, misread, parseFilter } from "./filter";
import { groupsOf } from "./groups";

const summary = (id: string, more: object = {}) =>
  create(RolloutSummarySchema, { rolloutId: id, phase: Phase.RUNNING, createTime: timestampFromMs(1000), ...more });
const told = (...ids: string[]) => ({ rollouts: ids.map((id) => summary(id)), goneRolloutIds: [], snapshotComplete: false });
const done = { rollouts: [], goneRolloutIds: [], snapshotComplete: true };
const ids = (board: Board) => listed([board]).map((row) => row.id);

describe("the board", () => {
  test("after a break, what the new snapshot does not have is gone, and only once it is complete", () => {
    const board = new Board();
    board.begin();
    board.apply(told("a", "b"));
    board.apply(done);
    board.begin();
    board.apply(told("b", "c"));
    expect(ids(board).sort()).toEqual(["a", "b", "c"]);
    board.apply(done);
    expect(ids(board).sort()).toEqual(["b", "c"]);
  });

  test("what is told as gone is gone", () => {
    const board = new Board();
    board.apply(told("a", "b"));
    expect(board.apply({ rollouts: [], goneRolloutIds: ["a"], snapshotComplete: false })).toBe(true);
    expect(ids(board)).toEqual(["b"]);
  });

  test("a heartbeat changes nothing", () => {
    expect(new Board().apply({ rollouts: [], goneRolloutIds: [], snapshotComplete: false })).toBe(false);
  });

  test("of those that have ended the newest are kept, and all that run", () => {
    const board = new Board(2);
    const ended = (id: string, ms: number) => summary(id, { phase: Phase.ENDED, endTime: timestampFromMs(ms) });
    const change = (...rollouts: ReturnType<typeof summary>[]) => board.apply({ rollouts, goneRolloutIds: [], snapshotComplete: false });
    board.begin();
    change(ended("newest", 3000), ended("newer", 2000), summary("a"), summary("b"), summary("c"));
    board.apply(done);
    expect(ids(board).sort()).toEqual(["a", "b", "c", "newer", "newest"]);
    change(ended("a", 4000));
    expect(ids(board).sort()).toEqual(["a", "b", "c", "newest"]);
    change(ended("a", 4000), ended("b", 5000));
    expect(ids(board).sort()).toEqual(["a", "b", "c"]);
    for (let index = 0; index < 100; index += 1) change(ended(String(index), 6000 + index));
    expect(ids(board).sort()).toEqual(["98", "99", "c"]);
  });

  test("however often snapshots come, the board has exactly the last one", () => {
    fc.assert(
      fc.property(fc.array(fc.uniqueArray(fc.integer({ min: 0, max: 9 }).map(String)), { minLength: 1 }), (snapshots) => {
        const board = new Board();
        for (const snapshot of snapshots) {
          board.begin();
          board.apply(told(...snapshot));
          board.apply(done);
        }
        expect(ids(board).sort()).toEqual([...(snapshots.at(-1) ?? [])].sort());
      }),
    );
  });
});

describe("a row", () => {
  test("says how it ended, and whose doing that was", () => {
    const failure = { cause: FailureCause.BUDGET, reason: "BUDGET_EXHAUSTED", causedBy: Party.BUDGET, message: "m" };
    const row = rowOf(summary("a", { phase: Phase.ENDED, endTime: timestampFromMs(3000), failure, reward: { value: 0.5 } }));
    expect(row).toMatchObject({ state: "failed", cause: "budget", party: "budget", reward: 0.5, ended: 3000 });
  });

  test("is no failure where somebody cancelled it, and waits while it is queued", () => {
    expect(rowOf(summary("a", { phase: Phase.ENDED, failure: { cause: FailureCause.CANCELLED } })).state).toBe("cancelled");
    expect(rowOf(summary("a", { phase: Phase.QUEUED })).state).toBe("waiting");
    expect(rowOf(summary("a", { phase: Phase.ENDED, endTime: timestampFromMs(1) })).state).toBe("completed");
  });
});

describe("a filter", () => {
  const row = rowOf(summary("r1", { agent: "shell", runId: "run-7", labels: { team: "a" }, taskId: "Copy", namespace: "team-a", phase: Phase.RUNNING }));
  test.each([
    ["", true],
    ["copy", true],
    ["copy shell", true],
    ["copy opencode", false],
    ["agent:shell", true],
    ["agent:she", false],
    ["run:run-7 state:live", true],
    ["state:ended", false],
    ["namespace:team-a", true],
    ["namespace:default", false],
    ["label:team", true],
    ["label:team=a", true],
    ["label:team=b", false],
    ["label:toString", false],
    ["state:nonsense", false],
    ["agent:", false],
  ])("%s", (text, wanted) => {
    expect(matches(row, parseFilter(text))).toBe(wanted);
  });

  test("says which of its keys and states there are not, and which was probably meant", () => {
    expect(misread("stat:faild copy")).toEqual(["There is no key stat:; did you mean state:? There are state:, agent:, run:, group:, task:, namespace:, driver:, label:."]);
    expect(misread("state:faild bogus:1")).toEqual([
      "There is no state faild; did you mean failed? There are waiting, running, live, ended, completed, failed, cancelled.",
      "There is no key bogus:. There are state:, agent:, run:, group:, task:, namespace:, driver:, label:.",
    ]);
    expect(misread("state: agent:shell label:team=a copy a/b:c")).toEqual([]);
  });

  test("reads any text", () => {
    fc.assert(fc.property(fc.string(), (text) => typeof matches(row, parseFilter(text)) === "boolean"));
  });
});

describe("groups", () => {
  const rows = [0.2, 0.4, null].map((value, index) =>
    rowOf(summary(`g-${index}`, { groupId: "g", index, ...(value === null ? {} : { reward: { value }, endTime: timestampFromMs(2000) }) })),
  );

  test("have the mean and the spread of the rewards that there are", () => {
    const [group] = groupsOf(rows);
    expect(group).toMatchObject({ id: "g", ended: 2, rewards: [0.2, 0.4], min: 0.2, max: 0.4 });
    expect(group?.mean).toBeCloseTo(0.3);
    expect(group?.spread).toBeCloseTo(0.1);
  });
});
