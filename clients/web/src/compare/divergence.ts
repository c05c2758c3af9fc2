/**
 * Where two rollouts of a task part: the first token of the main conversation that differs.
 *
 * Each token of a record is carried once (a call's prompt is a part of its parent's tokens and then its own), so walking the
 * calls in order compares every token once. Invariant (tested): everything before the place is equal in both, and at it the
 * two differ or one of them ends.
 */

import type { Call } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { int32 } from "../rollout/tokens";

export interface Divergence {
  /** Position of the call on its main branch, from 0. */
  readonly turn: number;
  /** The call's own number in the record of the left one and of the right one; undefined = it has none there. */
  readonly calls: readonly [number | undefined, number | undefined];
  /** In what the agent sent, in what the model sampled, or where one of them has no further call. */
  readonly where: "prompt" | "completion" | "end";
  /** Token in the new part of the prompt, or of the completion, from 0. */
  readonly token: number;
}

/** The first difference; undefined = there is none, or one of them has no tokens. */
export function divergence(left: readonly Call[], right: readonly Call[]): Divergence | undefined {
  const turns = Math.min(left.length, right.length);
  for (let turn = 0; turn < turns; turn += 1) {
    const [a, b] = [left[turn], right[turn]];
    if (!a || !b || a.promptCount === 0 || b.promptCount === 0) return undefined;
    const prompt = promptDifference(a, b);
    if (prompt >= 0) return { turn, calls: [a.index, b.index], where: "prompt", token: prompt };
    const sampled = firstDifference(sampledOf(a), sampledOf(b));
    if (sampled >= 0) return { turn, calls: [a.index, b.index], where: "completion", token: sampled };
  }
  return left.length === right.length ? undefined : { turn: turns, calls: [left[turns]?.index, right[turns]?.index], where: "end", token: 0 };
}

function promptDifference(a: Call, b: Call): number {
  if (a.promptSharedCount !== b.promptSharedCount) return 0;
  return firstDifference(int32(a.promptSuffixTokenIds), int32(b.promptSuffixTokenIds));
}

const sampledOf = (call: Call): Int32Array => int32(call.completion?.span?.tokenIds ?? new Uint8Array());

/** Index of the first element that differs or that only one has; -1 = they are equal. */
export function firstDifference(a: Int32Array, b: Int32Array): number {
  const length = Math.min(a.length, b.length);
  for (let index = 0; index < length; index += 1) if (a[index] !== b[index]) return index;
  return a.length === b.length ? -1 : length;
}

/** A place in words, counted from 0 as the record and `penstock diff` count. */
export function divergenceWords(found: Divergence): string {
  const [left, right] = found.calls;
  const call = left === undefined || right === undefined || left === right ? `call ${left ?? right}` : `call ${left} of the left one and call ${right} of the right one`;
  if (found.where === "end") return `They are alike until ${call}, which only one of them has.`;
  if (found.where === "prompt") return `They part at ${call}: what the agent sent differs, for example a tool's result.`;
  return `They part at ${call}, token ${found.token} of what the model sampled.`;
}
