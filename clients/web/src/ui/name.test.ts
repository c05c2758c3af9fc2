import { describe, expect, test } from "vitest";

import { groupName, isMade, rolloutName, shortName } from "./name";

const hex = "9f2c0123456789abcdef0123456789ab";
const of = { id: `r${hex}`, task: "fix-parser", agent: "codex", group: "", index: 3 };

describe("names", () => {
  test("are of task, agent and number where the id is random", () => {
    expect(rolloutName(of)).toBe("fix-parser · 9f2c · codex");
    expect(rolloutName({ ...of, id: `r${"0".repeat(32)}`, group: `g${hex}` })).toBe("fix-parser · 9f2c #3 · codex");
    expect(shortName({ ...of, group: `g${hex}` })).toBe("9f2c #3");
    expect(shortName({ id: `g.d0.${hex}-12` })).toBe("9f2c #12");
    expect(groupName({ ...of, id: `g${hex}` })).toBe("fix-parser · 9f2c · codex");
    expect(shortName({ ...of, id: `g.d0.${hex}-3`, group: `g.d0.${hex}` })).toBe("9f2c #3");
    expect(shortName({ ...of, group: "step-7" })).toBe("step-7 #3");
  });

  test("are the id where somebody chose it", () => {
    expect([rolloutName({ ...of, id: "row-0007" }), shortName({ ...of, id: "row-0007", group: "g" }), groupName({ ...of, id: "run-3-001" })]).toEqual(["row-0007", "row-0007", "run-3-001"]);
  });

  test.each([
    [`r${hex}`, true],
    [`r.d-0.${hex}`, true],
    [`g.d0.${hex}-12`, true],
    [`step-7-${hex}-12`, false],
    [`r${hex}0`, false],
    ["deadbeef", false],
    ["", false],
  ])("%s is random: %s", (id, wanted) => {
    expect(isMade(id)).toBe(wanted);
  });

  test("show what a task's author hid, and are bounded", () => {
    expect(rolloutName({ ...of, task: "a\u202eb" })).not.toContain("\u202e");
    expect(rolloutName({ ...of, task: "x".repeat(1000) }).length).toBeLessThan(80);
  });
});
