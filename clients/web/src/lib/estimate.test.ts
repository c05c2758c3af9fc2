import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { boundedMean, difference, type Estimate, median, normalMean, shareOf, wilson } from "./estimate";

/** Figures of `penstock.evaluation.statistics`. */
describe("intervals are those of the command line", () => {
  test.each([
    [0.5, 10, 0.236593090512564, 0.7634069094874361],
    [0, 4, 0, 0.4898908364545973],
    [1, 4, 0.5101091635454027, 1],
    [0.3, 7.5, 0.09257295457382414, 0.6429108092497444],
  ])("Wilson's of %d in %d", (share, observations, low, high) => {
    const found = wilson(share, observations);
    expect(found[0]).toBeCloseTo(low, 12);
    expect(found[1]).toBeCloseTo(high, 12);
  });

  test.each<[Record<string, number[]>, [number, number], number, number, number]>([
    [{ a: [1, 0, 1, 1] }, [0, 1], 0.75, 0.30064184258240184, 0.9544127391902995],
    [{ a: [1, 0, 1, 1], b: [0, 0, 0, 1], c: [1, 1] }, [0, 1], 0.6666666666666666, 0.2630554795916735, 0.9180725270943928],
    [{ a: [1], b: [1], c: [1] }, [0, 1], 1, 0.43850296824495455, 1],
    [{ a: [0.5, -0.25], b: [2] }, [-1, 2], 1.0625, -0.460240134625981, 1.8699094005195516],
    [{ a: Array<number>(300).fill(0.1), b: Array<number>(7).fill(0.1) }, [0, 1], 0.1, 0.004746385204495551, 0.721349432790182],
  ])("%j", (rewards, range, value, low, high) => {
    const found = boundedMean(new Map(Object.entries(rewards)), range);
    expect(found?.value).toBeCloseTo(value, 12);
    expect(found?.low).toBeCloseTo(low, 12);
    expect(found?.high).toBeCloseTo(high, 12);
  });

  test("the normal one has no width where nothing varies", () => {
    expect(normalMean([1, 2, 3, 10])?.high).toBeCloseTo(4 + 4.0007597302960916, 12);
    expect(normalMean([2, 2])).toEqual({ value: 2, low: 2, high: 2, count: 2 });
    expect(normalMean([5])).toEqual({ value: 5, low: 5, high: 5, count: 1 });
  });

  test("there is none of nothing", () => {
    expect([boundedMean(new Map([["a", []]]), [0, 1]), normalMean([]), shareOf(0, 0), median([])]).toEqual([null, null, null, null]);
  });
});

test("an interval holds its mean and stays within the range of rewards", () => {
  const tasks = fc.dictionary(fc.string({ maxLength: 2 }), fc.array(fc.integer({ min: 0, max: 4 }).map((part) => part / 4), { minLength: 1, maxLength: 9 }), { minKeys: 1, maxKeys: 6 });
  fc.assert(
    fc.property(tasks, (rewards) => {
      const found = boundedMean(new Map(Object.entries(rewards)), [0, 1]);
      expect(found).toSatisfy((one: Estimate) => 0 <= one.low && one.low <= one.value && one.value <= one.high && one.high <= 1);
    }),
  );
});

test("the middle of an even number lies between two", () => {
  expect([median([3, 1, 2]), median([4, 1, 3, 2])]).toEqual([2, 2.5]);
});

test("a difference has a sign, and its interval is as wide as both", () => {
  const a = shareOf(2, 10);
  const b = shareOf(9, 10);
  if (!a || !b) throw new Error("both are there");
  const found = difference(a, b);
  // Newcombe's method 10 for 9/10 - 2/10.
  expect([found.value, found.low, found.high].map((one) => Math.round(one * 1000) / 1000)).toEqual([0.7, 0.266, 0.865]);
  const back = difference(b, a);
  expect([back.low, back.high]).toEqual([-found.high, -found.low]);
});
