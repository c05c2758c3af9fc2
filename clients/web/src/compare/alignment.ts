/**
 * Which sampled tokens of one call are those of another: the tokens of both, in the same order, as many as there are, but for those
 * that fewer than LEAST_RUN beside each other have in common: any two answers share single words and commas by chance.
 *
 * By E. W. Myers, "An O(ND) difference algorithm and its variations" (Algorithmica 1, 1986), behind a common beginning and before
 * a common end. Invariants (tested): what is matched is equal and in order on both sides, no token is matched twice, and a
 * common beginning is matched whole. Where the two differ in more than MOST_EDITS tokens, what lies between the common ends counts as
 * changed: the work grows with the square of that number.
 */

import type { Call } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { type Counterpart, float32, int32 } from "../rollout/tokens";
import type { Divergence } from "./divergence";

export type SideName = "left" | "right";

/** Tokens that one has and the other does not; both counted. */
export const MOST_EDITS = 1_000;

/** Tokens beside each other that count as the same, unless they begin or end both. */
export const LEAST_RUN = 3;

/** For each of the left ones the index of the same token on the right; -1 = it has none. */
export function align(left: Int32Array, right: Int32Array, leastRun = LEAST_RUN): Int32Array {
  const matched = new Int32Array(left.length).fill(-1);
  let start = 0;
  while (start < left.length && start < right.length && left[start] === right[start]) {
    matched[start] = start;
    start += 1;
  }
  let [leftEnd, rightEnd] = [left.length, right.length];
  while (leftEnd > start && rightEnd > start && left[leftEnd - 1] === right[rightEnd - 1]) {
    leftEnd -= 1;
    rightEnd -= 1;
    matched[leftEnd] = rightEnd;
  }
  for (const [a, b] of middle(left.subarray(start, leftEnd), right.subarray(start, rightEnd))) matched[start + a] = start + b;
  withoutShort(matched.subarray(start, leftEnd), leastRun);
  return matched;
}

/** Takes out the matches of which fewer than `leastRun` lie beside each other on both sides. */
function withoutShort(matched: Int32Array, leastRun: number): void {
  let from = 0;
  for (let at = 1; at <= matched.length; at += 1) {
    const before = matched[at - 1] ?? -1;
    if (at < matched.length && before >= 0 && matched[at] === before + 1) continue;
    if (at - from < leastRun) matched.fill(-1, from, at);
    from = at;
  }
}

/** The pairs of a longest common part, in any order. */
function middle(left: Int32Array, right: Int32Array): (readonly [number, number])[] {
  if (!left.length || !right.length) return [];
  const most = Math.min(MOST_EDITS, left.length + right.length);
  // For each diagonal (left - right) how far along the left one a path of so many edits comes.
  const reach = new Int32Array(2 * most + 3);
  const at = (diagonal: number): number => reach[diagonal + most + 1] ?? 0;
  const history: Int32Array[] = [];
  for (let edits = 0; edits <= most; edits += 1) {
    // Only what the next step reads is kept: edits + 1 diagonals on either side.
    history.push(reach.slice(most - edits, most + edits + 3));
    for (let diagonal = -edits; diagonal <= edits; diagonal += 2) {
      let x = isDown(diagonal, edits, at) ? at(diagonal + 1) : at(diagonal - 1) + 1;
      while (x < left.length && x - diagonal < right.length && left[x] === right[x - diagonal]) x += 1;
      reach[diagonal + most + 1] = x;
      if (x >= left.length && x - diagonal >= right.length) return traced(history, left.length, right.length);
    }
  }
  return [];
}

/** Whether the farthest path to a diagonal comes by a token of the right one, instead of one of the left one. */
function isDown(diagonal: number, edits: number, at: (diagonal: number) => number): boolean {
  return diagonal === -edits || (diagonal !== edits && at(diagonal - 1) < at(diagonal + 1));
}

function traced(history: readonly Int32Array[], leftLength: number, rightLength: number): (readonly [number, number])[] {
  const pairs: (readonly [number, number])[] = [];
  let [x, y] = [leftLength, rightLength];
  for (let edits = history.length - 1; edits >= 0; edits -= 1) {
    const reach = history[edits] ?? new Int32Array();
    const at = (diagonal: number): number => reach[diagonal + edits + 1] ?? 0;
    const diagonal = x - y;
    const before = isDown(diagonal, edits, at) ? diagonal + 1 : diagonal - 1;
    const [fromX, fromY] = edits === 0 ? [0, 0] : [at(before), at(before) - before];
    while (x > fromX && y > fromY) {
      x -= 1;
      y -= 1;
      pairs.push([x, y]);
    }
    [x, y] = [fromX, fromY];
  }
  return pairs;
}

/** What the other side of a pair has at each token of a call. */
export function counterpartOf(call: Call, other: Call | undefined, side: SideName, sameUntil: number): Counterpart {
  const [own, theirs] = [sampledOf(call), other ? sampledOf(other) : new Int32Array()];
  const at = side === "left" ? align(own, theirs) : inverted(align(theirs, own), own.length);
  const logprobs = float32(other?.completion?.span?.logprobs ?? new Uint8Array());
  return { side, at, logprobs: logprobs.length === theirs.length ? logprobs : undefined, sameUntil };
}

function inverted(matched: Int32Array, length: number): Int32Array {
  const made = new Int32Array(length).fill(-1);
  matched.forEach((to, from) => {
    if (to >= 0) made[to] = from;
  });
  return made;
}

const sampledOf = (call: Call): Int32Array => int32(call.completion?.span?.tokenIds ?? new Uint8Array());

/**
 * For each turn how many of its sampled tokens follow the same tokens in both: only of these the logprobs are of the same question.
 *
 * @param parting where the two part; undefined = nowhere, as far as tokens were captured.
 */
export function sameContexts(left: readonly Call[], right: readonly Call[], parting: Divergence | undefined): number[] {
  let isCaptured = true;
  return Array.from({ length: Math.max(left.length, right.length) }, (_, turn) => {
    // Without the tokens of a prompt nobody knows what the answers to it, and all later ones, followed.
    isCaptured &&= (left[turn]?.promptCount ?? 0) > 0 && (right[turn]?.promptCount ?? 0) > 0;
    if (!isCaptured) return 0;
    if (parting === undefined || turn < parting.turn) return Infinity;
    // The token at which they part still follows the same tokens: it is no match, so that it has no difference.
    return turn === parting.turn && parting.where === "completion" ? parting.token : 0;
  });
}
