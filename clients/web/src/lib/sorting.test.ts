import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { changed } from "./router";
import { nextSorting, parseSorting, sorted } from "./sorting";

describe("the order of a table", () => {
  test("is that of the address, if it names a column", () => {
    expect(parseSorting("-reward", ["reward"])).toEqual({ by: "reward", isDown: true });
    expect(parseSorting("reward", ["reward"])).toEqual({ by: "reward", isDown: false });
    expect([parseSorting(null, ["reward"]), parseSorting("-", ["reward"]), parseSorting("toString", ["reward"])]).toEqual([undefined, undefined, undefined]);
  });

  test("goes from one direction to the other, and then to none", () => {
    const press = (text: string) => nextSorting(parseSorting(text, ["reward"]), "reward", true);
    expect(["", "-reward", "reward"].map(press)).toEqual(["-reward", "reward", ""]);
    expect(nextSorting({ by: "task", isDown: true }, "reward", false)).toBe("reward");
  });

  test("has what is not known last, in either direction, and numbers in words by their size", () => {
    const rows = ["task-10", null, "task-9"];
    expect(sorted(rows, (row) => row, false)).toEqual(["task-9", "task-10", null]);
    expect(sorted(rows, (row) => row, true)).toEqual(["task-10", "task-9", null]);
  });

  test("loses no row and keeps those that are alike in place", () => {
    fc.assert(
      fc.property(fc.array(fc.option(fc.integer({ min: 0, max: 3 }))), fc.boolean(), (keys, isDown) => {
        const rows = keys.map((key, index) => ({ key, index }));
        const found = sorted(rows, (row) => row.key, isDown);
        expect([...found].sort((a, b) => a.index - b.index)).toEqual(rows);
        found.forEach((row, at) => {
          const before = found[at - 1];
          if (before && before.key === row.key) expect(before.index).toBeLessThan(row.index);
        });
      }),
    );
  });
});

test("a change of the query leaves its other keys as they are", () => {
  expect(changed(new URLSearchParams("q=a b&sort=task"), { sort: "", page: "2" }).toString()).toBe("q=a+b&page=2");
});
