import fc from "fast-check";
import { expect, test } from "vitest";

import { ariaSort, PAGE_ROWS, paged } from "./datatable";
import { percent } from "./figure";

test("a page that is not there is the nearest, whatever the address asks for", () => {
  expect([paged(0, null), paged(51, "2"), paged(51, "9"), paged(51, "-1"), paged(50, "1e3")].map(({ first, page, pages }) => [first, page, pages])).toEqual([
    [0, 1, 1],
    [50, 2, 2],
    [50, 2, 2],
    [0, 1, 2],
    [0, 1, 1],
  ]);
  fc.assert(
    fc.property(fc.nat(10_000), fc.option(fc.string()), (count, asked) => {
      const { first, page, pages } = paged(count, asked);
      return first === (page - 1) * PAGE_ROWS && page >= 1 && page <= pages && (count === 0 || first < count);
    }),
  );
});

test("a column's head tells its order", () => {
  expect([ariaSort({ by: "a", isDown: true }, "a"), ariaSort({ by: "a", isDown: false }, "a"), ariaSort({ by: "b", isDown: true }, "a"), ariaSort(undefined, "a")]).toEqual(["descending", "ascending", "none", "none"]);
});

test("a share is not rounded to none or all", () => {
  expect([0, 0.001, 0.5, 0.999, 1].map(percent)).toEqual(["0 %", "<1 %", "50 %", ">99 %", "100 %"]);
});
