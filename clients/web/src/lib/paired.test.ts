import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { pairedDifference, signFlips } from "./paired";

/** By its definition: every assignment of signs. */
function enumerated(differences: readonly number[]): number {
  const observed = Math.abs(differences.reduce((sum, one) => sum + one, 0));
  let extreme = 0;
  for (let signs = 0; signs < 1 << differences.length; signs += 1) {
    const sum = differences.reduce((total, one, index) => total + ((signs >> index) & 1 ? one : -one), 0);
    if (Math.abs(sum) >= observed) extreme += 1;
  }
  return extreme / (1 << differences.length);
}

const rewards = (values: Readonly<Record<string, readonly number[]>>) => new Map(Object.entries(values));
const both = (first: Readonly<Record<string, readonly number[]>>, second: Readonly<Record<string, readonly number[]>>) => pairedDifference(rewards(first), rewards(second), 1);

describe("the sign-flip test", () => {
  test("is the share of signs that give as much", () => {
    fc.assert(
      fc.property(fc.array(fc.integer({ min: -40, max: 40 }), { minLength: 1, maxLength: 8 }), (differences) => {
        expect(signFlips(differences)).toBeCloseTo(enumerated(differences), 12);
      }),
    );
  });

  /** Figures of `penstock.evaluation.permutation`. */
  test.each([
    [[1], 1],
    [[2, 2, 2, 2, 2, 0, 0], 1 / 16],
    [Array<number>(10).fill(3), 1 / 512],
    [Array<number>(400).fill(1), 2 ** -399],
    [[], 1],
    [[0, 0], 1],
    [[6, -2, 9, 3, 3, -1, 8], 0.09375],
  ])("of %j is that of the command line", (differences, p) => {
    expect(signFlips(differences) / p).toBeCloseTo(1, 10);
  });
});

describe("two sets of rewards", () => {
  test("are compared over the tasks that both have, each with one weight", () => {
    const found = both({ a: [0, 0], b: [0, 1], c: [0], d: [0], e: [0], only: [1] }, { a: [1], b: [1, 1, 1, 1], c: [1], d: [1], e: [1], other: [0], none: [] });
    expect(found?.tasks).toBe(5);
    expect(found?.value).toBeCloseTo(0.9, 12);
    expect(found?.p).toBe(1 / 16);
    // Figures of `penstock.evaluation.statistics.mean`; no difference of shares is greater than 1.
    expect(found?.interval?.[0]).toBeCloseTo(0.9 - 0.1959963984540054, 12);
    expect(found?.interval?.[1]).toBe(1);
  });

  test("have no comparison with fewer than two tasks, and no interval where tasks do not vary", () => {
    expect(both({ a: [0], b: [1] }, { a: [1], c: [1] })).toBeNull();
    expect(both({}, {})).toBeNull();
    expect(both({ a: [0.1], b: [0.3] }, { a: [0.3], b: [0.5] })).toMatchObject({ interval: null, p: 0.5 });
    expect(both({ a: [1], b: [0] }, { a: [1], b: [0] })).toEqual({ value: 0, interval: null, p: 1, tasks: 2 });
  });

  test("that are the same are not different, whatever their digits", () => {
    const values = { a: [1 / 3], b: [2 / 3, 0.1234567] };
    expect(both(values, values)).toEqual({ value: 0, interval: null, p: 1, tasks: 2 });
  });

  test("tie exactly, whatever the numbers of attempts: 0.1 and 0.2 are 0.3", () => {
    // 1/10 + 2/10 - 3/10 = 0: every assignment of signs gives as much.
    expect(both({ a: [0], b: [0], c: [0.3] }, { a: [0.1], b: [0.2], c: [0] })).toMatchObject({ value: 0, p: 1 });
    // Thirds and sixths.
    expect(both({ a: [0, 0, 0], b: [0], c: [1, 1, 0, 0, 0, 0] }, { a: [1, 0, 0], b: [0, 0, 0], c: [0] })).toMatchObject({ value: 0, p: 1 });
  });

  test("of any numbers have a p of at least its share by chance", () => {
    const values = fc.array(fc.double({ min: 0, max: 1, noNaN: true }), { minLength: 1, maxLength: 5 });
    fc.assert(
      fc.property(fc.array(fc.tuple(values, values), { minLength: 2, maxLength: 9 }), (pairs) => {
        const [left, right] = [0, 1].map((side) => new Map(pairs.map((pair, task) => [String(task), pair[side] ?? []])));
        if (!left || !right) throw new Error("both are there");
        const found = pairedDifference(left, right, 1);
        const other = pairedDifference(right, left, 1);
        expect(found?.p).toSatisfy((p: number) => 2 ** (1 - pairs.length) * 0.999 <= p && p <= 1);
        expect(found?.p).toBeCloseTo(other?.p ?? NaN, 12);
        expect(found?.value).toBeCloseTo(-(other?.value ?? NaN), 12);
      }),
    );
  });

  test("that do not differ are seldom called different", () => {
    let state = 1;
    const drawn = () => (state = (state * 48271) % 2147483647) / 2147483647;
    let wrong = 0;
    for (let trial = 0; trial < 300; trial += 1) {
      // Tasks of different difficulty, rewards with many digits.
      const tasks = Array.from({ length: 12 }, (_, index) => [String(index), drawn()] as const);
      const run = () => new Map(tasks.map(([task, level]) => [task, [level + 0.1 * drawn(), level + 0.1 * drawn()]]));
      if ((pairedDifference(run(), run(), 1.1)?.p ?? 1) <= 0.05) wrong += 1;
    }
    expect(wrong).toBeLessThanOrEqual(0.05 * 300 + 2 * Math.sqrt(0.05 * 0.95 * 300));
  });

  test("of thousands of tasks take no longer than the table allows", () => {
    const many = (of: (index: number) => number) => new Map(Array.from({ length: 2000 }, (_, index) => [String(index), [of(index)]]));
    expect(pairedDifference(many(() => 0), many((index) => Math.sin(index)), 2)?.p).toSatisfy((p: number) => 0 < p && p <= 1);
    expect(pairedDifference(many((index) => index % 2), many((index) => index % 3 && 1), 1)?.p).toSatisfy((p: number) => 0 <= p && p < 0.01);
    const tooMany = new Map(Array.from({ length: 9000 }, (_, index) => [String(index), [Math.sin(index)]]));
    expect(pairedDifference(new Map([...tooMany.keys()].map((key) => [key, [0]])), tooMany, 2)?.p).toBeNull();
  });
});
