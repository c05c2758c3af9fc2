import { create } from "@bufbuild/protobuf";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { FailureCause, Phase, type RolloutSummary, RolloutSummarySchema } from "@gen/penstock/driver/v1/rollout_pb";
import { type Call, CallSchema } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { divergence, divergenceWords, firstDifference } from "./divergence";
import { advantage, bestAndWorst, groupTone, spread } from "./spread";

const bytes = (ids: readonly number[]): Uint8Array => new Uint8Array(Int32Array.from(ids).buffer);
const call = (suffix: readonly number[], sampled: readonly number[], shared = 0, index = shared ? 1 : 0): Call =>
  create(CallSchema, { index, promptSuffixTokenIds: bytes(suffix), promptSharedCount: shared, promptCount: shared + suffix.length, completion: { span: { tokenIds: bytes(sampled), count: sampled.length } } });

describe("where siblings part", () => {
  test("the first token that differs is found in what was sampled or in what the agent sent", () => {
    const first = call([1, 2], [3, 4]);
    expect(divergence([first], [call([1, 2], [3, 9])])).toEqual({ turn: 0, calls: [0, 0], where: "completion", token: 1 });
    expect(divergence([first, call([5], [6], 4)], [first, call([7], [6], 4)])).toEqual({ turn: 1, calls: [1, 1], where: "prompt", token: 0 });
    expect(divergence([first], [first, call([5], [6], 4)])).toEqual({ turn: 1, calls: [undefined, 1], where: "end", token: 0 });
    expect(divergence([first], [first])).toBeUndefined();
    expect(divergence([create(CallSchema)], [first])).toBeUndefined();
  });

  test("a place is told as the record counts, also where a side call moved the calls of one of them", () => {
    const [left, right] = [call([1, 2], [3, 4]), call([1, 2], [3, 9], 0, 1)];
    const found = divergence([left], [call([1, 2], [3, 9])]);
    expect(found && divergenceWords(found)).toBe("They part at call 0, token 1 of what the model sampled.");
    const moved = divergence([left], [right]);
    expect(moved && divergenceWords(moved)).toBe("They part at call 0 of the left one and call 1 of the right one, token 1 of what the model sampled.");
    expect(divergenceWords({ turn: 1, calls: [undefined, 2], where: "end", token: 0 })).toBe("They are alike until call 2, which only one of them has.");
  });

  test("all before the first difference is equal, and at it the two differ or one ends", () => {
    const ids = fc.array(fc.integer({ min: 0, max: 2 }), { maxLength: 12 }).map((many) => Int32Array.from(many));
    fc.assert(
      fc.property(ids, ids, (a, b) => {
        const at = firstDifference(a, b);
        if (at < 0) expect([...a]).toEqual([...b]);
        else {
          expect([...a.slice(0, at)]).toEqual([...b.slice(0, at)]);
          expect(a[at]).not.toBe(b[at]);
        }
      }),
    );
  });
});

describe("a group's figures", () => {
  const rollout = (index: number, value?: number): RolloutSummary =>
    create(RolloutSummarySchema, { rolloutId: `r${index}`, index, ...(value !== undefined && { reward: { value, rangeMin: 0, rangeMax: 1 } }) });

  test("the best and the worst are chosen, and those without a reward only where there are no two with one", () => {
    expect(bestAndWorst([rollout(0, 0.5), rollout(1), rollout(2, 1), rollout(3, 0)])).toEqual(["r2", "r3"]);
    expect(bestAndWorst([rollout(0), rollout(1, 0)])).toEqual(["r1", "r0"]);
    expect(bestAndWorst([rollout(0), rollout(1)])).toEqual(["r0", "r1"]);
    expect(bestAndWorst([rollout(0, 1)])).toBeUndefined();
  });

  test("is busy while one runs, and a warning only where one failed", () => {
    const ended = create(RolloutSummarySchema, { phase: Phase.ENDED });
    const failed = create(RolloutSummarySchema, { phase: Phase.ENDED, failure: { cause: FailureCause.AGENT } });
    const running = create(RolloutSummarySchema, { phase: Phase.RUNNING });
    expect([[ended, ended], [ended, failed], [failed, running], []].map(groupTone)).toEqual(["good", "warn", "busy", "busy"]);
  });

  test("rewards that are all equal set nobody apart", () => {
    for (let size = 1; size <= 64; size++) {
      for (const reward of [0.1, 1 / 3, 0.7, 1e9 + 0.1]) {
        const equal = spread(new Array<number>(size).fill(reward));
        expect(equal).toMatchObject({ mean: reward, deviation: 0 });
        expect(equal && advantage(reward, equal)).toBeUndefined();
      }
    }
    const differing = spread([0, 1]);
    expect(differing).toMatchObject({ mean: 0.5, deviation: 0.5, least: 0, most: 1, count: 2 });
    expect(differing && advantage(1, differing)).toBe(1);
    expect(spread([])).toBeUndefined();
  });
});
