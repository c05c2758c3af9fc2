import { create } from "@bufbuild/protobuf";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { type Call, CallSchema } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { changeFigures, runs, span } from "../rollout/tokens";
import { align, counterpartOf, MOST_EDITS, sameContexts } from "./alignment";
import { divergence, firstDifference } from "./divergence";

const bytes = (values: readonly number[], Kind: Int32ArrayConstructor | Float32ArrayConstructor = Int32Array): Uint8Array => new Uint8Array(Kind.from(values).buffer);
const call = (sampled: readonly number[], logprobs: readonly number[] = [], index = 0, prompt = [1]): Call =>
  create(CallSchema, {
    ...{ index, promptSuffixTokenIds: bytes(prompt), promptCount: prompt.length },
    completion: { span: { tokenIds: bytes(sampled), count: sampled.length, logprobs: bytes(logprobs, Float32Array) } },
  });

/** The length of a longest common part, in the obvious way. */
function commonLength(a: Int32Array, b: Int32Array): number {
  let before = new Array<number>(b.length + 1).fill(0);
  for (const one of a) {
    const next = [0];
    b.forEach((other, index) => next.push(one === other ? (before[index] ?? 0) + 1 : Math.max(before[index + 1] ?? 0, next[index] ?? 0)));
    before = next;
  }
  return before[b.length] ?? 0;
}

describe("tokens that two have in common", () => {
  const ids = fc.array(fc.integer({ min: 0, max: 3 }), { maxLength: 40 }).map((many) => Int32Array.from(many));

  test("are equal, in order and as many as there are, and the common beginning is among them", () => {
    fc.assert(
      fc.property(ids, ids, (left, right) => {
        const found = align(left, right, 1);
        expect(found).toHaveLength(left.length);
        const pairs = [...found].flatMap((to, from) => (to < 0 ? [] : [[from, to] as const]));
        pairs.forEach(([from, to], index) => {
          expect(left[from]).toBe(right[to]);
          expect(to).toBeGreaterThan(pairs[index - 1]?.[1] ?? -1);
        });
        expect(pairs).toHaveLength(commonLength(left, right));
        const parting = firstDifference(left, right);
        for (let at = 0; at < (parting < 0 ? left.length : parting); at += 1) expect(found[at]).toBe(at);
      }),
    );
  });

  test("do not count where only one or two stand beside each other, unless both begin or end with them", () => {
    const found = align(Int32Array.from([1, 9, 2, 3, 9, 4, 5, 6, 9, 7]), Int32Array.from([1, 8, 8, 2, 3, 8, 4, 5, 6, 8, 7]));
    expect([...found]).toEqual([0, -1, -1, -1, -1, 6, 7, 8, -1, 10]);
  });

  test("are only the common ends where the two are too different to be matched", () => {
    const middle = (start: number): number[] => Array.from({ length: MOST_EDITS }, (_, index) => start + 2 * index);
    const found = align(Int32Array.from([-1, ...middle(0), -2]), Int32Array.from([-1, ...middle(1), -2]));
    expect(found[0]).toBe(0);
    expect(found.at(-1)).toBe(MOST_EDITS + 1);
    expect(found.subarray(1, -1).every((to) => to === -1)).toBe(true);
  });
});

describe("a call beside its counterpart", () => {
  const [left, right] = [call([5, 6, 7, 8], [-1, -2, -3, -4]), call([5, 6, 9, 8], [-0.5, -1, -9, -3.5])];
  const spanOf = (one: Call, other: Call | undefined, side: "left" | "right", sameUntil: number) => ({
    ...span(Int32Array.from(side === "left" ? [5, 6, 7, 8] : [5, 6, 9, 8]), Float32Array.from(side === "left" ? [-1, -2, -3, -4] : [-0.5, -1, -9, -3.5]), [], undefined, ""),
    counterpart: counterpartOf(one, other, side, sameUntil),
  });

  test("has looks of what is the same and what changed, also where the other has no such call", () => {
    const looks = (other: Call | undefined) => runs(spanOf(left, other, "left", 2), "change", 0, 4).map(({ start, end, classes }) => [start, end, classes]);
    expect(looks(right)).toEqual([[0, 2, "same"], [2, 3, "changed"], [3, 4, "same"]]);
    expect(looks(undefined)).toEqual([[0, 4, "changed"]]);
  });

  test("differs in logprob by right minus left, whichever is looked at, over the tokens before which both are alike", () => {
    for (const side of ["left", "right"] as const) {
      const [own, other] = side === "left" ? [left, right] : [right, left];
      expect(changeFigures(spanOf(own, other, side, 2))).toEqual({ same: 3, compared: 2, mean: 0.75 });
    }
    expect(changeFigures(spanOf(left, right, "left", 0))).toEqual({ same: 3, compared: 0, mean: 0 });
    expect(changeFigures(span(Int32Array.of(1), undefined, [], undefined, ""))).toBeUndefined();
  });

  test("follows the same tokens up to the first difference, and where a prompt was not captured nobody knows", () => {
    const same = (a: readonly Call[], b: readonly Call[]) => sameContexts(a, b, divergence(a, b));
    expect(same([left, left], [left, right])).toEqual([Infinity, 2]);
    expect(same([left, left, left], [left, right, left])).toEqual([Infinity, 2, 0]);
    expect(same([left], [call([5], [], 0, [2])])).toEqual([0]);
    expect(same([left, left], [left])).toEqual([Infinity, 0]);
    expect(same([left, call([1], [], 1, []), left], [left, call([1], [], 1, []), left])).toEqual([Infinity, 0, 0]);
  });
});
