/**
 * A rollout's calls as a tree: branches of turns, each branch hanging from the turn after which it left another.
 *
 * Built of what is there: while a rollout runs its branches are not reported yet, and calls without one are put on a branch of
 * their own class. Invariant (tested): every call is in the tree exactly once, whatever the records say of each other
 * (a branch may name calls that are not there, and calls branches that are not there; rings are cut), and branches are nested
 * no deeper than MAX_NESTING: an agent decides how deep they hang from each other, and a page stands only so much.
 */

import { type Branch, type Call, CallClass, type Sample } from "@gen/penstock/trajectory/v1/trajectory_pb";

/** A model call, and the branches that left the conversation after it. */
export interface Turn {
  readonly call: Call;
  /** Position on its branch, from 1. */
  readonly number: number;
  /** Why its tokens are masked, in the word of the record; empty = trained; undefined = not known (yet). */
  readonly untrained: string | undefined;
  readonly branches: readonly TreeBranch[];
}

export interface TreeBranch {
  readonly id: string;
  readonly branchClass: CallClass;
  /** Why it opened; empty for the first. */
  readonly reason: string;
  /** Tokens that it shares with the turn that it left. */
  readonly shared: number;
  /** It left a turn of a branch before it, and would stand deeper than is shown. */
  readonly isDeeper: boolean;
  readonly turns: readonly Turn[];
}

/** Branches inside of each other, the outermost counted: those that hang deeper follow the one that they left. */
export const MAX_NESTING = 8;

interface Draft {
  id: string;
  branchClass: CallClass;
  reason: string;
  shared: number;
  forkCallId: string | undefined;
  calls: Call[];
}

/** The roots of the tree, the main conversation first, then by the time of their first call. */
export function conversationTree(
  calls: readonly Call[],
  branches: readonly Branch[],
  samples: readonly Sample[],
): TreeBranch[] {
  const reasons = untrainedReasons(samples);
  const drafts = draftsOf(calls, branches);
  const parentOf = parents(drafts);
  const children = new Map<string, Draft[]>();
  const roots: Draft[] = [];
  for (const draft of drafts) {
    const forkCallId = parentOf.has(draft) ? draft.forkCallId : undefined;
    if (forkCallId === undefined) {
      roots.push(draft);
      continue;
    }
    const others = children.get(forkCallId);
    if (others) others.push(draft);
    else children.set(forkCallId, [draft]);
  }
  for (const many of children.values()) many.sort(byFirstCall);

  const leaving = (call: Call): readonly Draft[] => children.get(call.callId) ?? [];
  const grown = (draft: Draft, level: number, isDeeper: boolean): TreeBranch => ({
    id: draft.id,
    branchClass: draft.branchClass,
    reason: draft.reason,
    shared: draft.shared,
    isDeeper,
    turns: draft.calls.map((call, index) => ({
      call,
      number: index + 1,
      untrained: samples.length === 0 ? undefined : reasons.get(call.callId),
      branches: level === MAX_NESTING ? [] : level === MAX_NESTING - 1 ? flat(leaving(call)) : leaving(call).map((child) => grown(child, level + 1, false)),
    })),
  });
  /** Branches of the deepest level, each followed by all that left it, in the order in which they are read. */
  const flat = (several: readonly Draft[]): TreeBranch[] => {
    const made: TreeBranch[] = [];
    const next = several.map((draft) => ({ draft, isDeeper: false })).reverse();
    for (let at = next.pop(); at; at = next.pop()) {
      made.push(grown(at.draft, MAX_NESTING, at.isDeeper));
      for (const draft of at.draft.calls.flatMap(leaving).reverse()) next.push({ draft, isDeeper: true });
    }
    return made;
  };
  return roots.sort(byRank).map((draft) => grown(draft, 1, false));
}

/** From which draft each leaves; one that would close a ring leaves none. */
function parents(drafts: readonly Draft[]): ReadonlyMap<Draft, Draft> {
  const owner = new Map(drafts.flatMap((draft) => draft.calls.map((call) => [call.callId, draft] as const)));
  const found = new Map<Draft, Draft>();
  const done = new Set<Draft>();
  for (const draft of drafts) {
    const path = new Set<Draft>();
    for (let at: Draft | undefined = draft; at && !done.has(at); at = found.get(at)) {
      path.add(at);
      const parent: Draft | undefined = at.forkCallId === undefined ? undefined : owner.get(at.forkCallId);
      if (parent && !path.has(parent)) found.set(at, parent);
    }
    for (const one of path) done.add(one);
  }
  return found;
}

function draftsOf(calls: readonly Call[], branches: readonly Branch[]): Draft[] {
  const left = new Map(calls.map((call) => [call.callId, call]));
  const drafts: Draft[] = [];
  const byId = new Map<string, Draft>();
  for (const branch of branches) {
    const draft: Draft = {
      id: branch.branchId,
      branchClass: branch.branchClass,
      reason: branch.reason,
      shared: branch.sharedCount,
      forkCallId: branch.forkCallId,
      calls: [],
    };
    for (const id of branch.callIds) {
      const call = left.get(id);
      if (!call) continue;
      left.delete(id);
      draft.calls.push(call);
    }
    if (draft.calls.length > 0) {
      drafts.push(draft);
      byId.set(draft.id, draft);
    }
  }
  for (const call of [...left.values()].sort((a, b) => a.index - b.index)) {
    const id = call.branchId === "" ? `class-${call.callClass}` : call.branchId;
    const known = byId.get(id);
    if (known) {
      known.calls.push(call);
      continue;
    }
    const draft: Draft = {
      id,
      branchClass: call.callClass,
      reason: "",
      shared: call.promptSharedCount,
      forkCallId: call.parentCallId,
      calls: [call],
    };
    drafts.push(draft);
    byId.set(id, draft);
  }
  return drafts;
}

function byFirstCall(a: Draft, b: Draft): number {
  return (a.calls[0]?.index ?? 0) - (b.calls[0]?.index ?? 0);
}

function byRank(a: Draft, b: Draft): number {
  const rank = (draft: Draft): number => (draft.branchClass === CallClass.MAIN ? 0 : 1);
  return rank(a) - rank(b) || byFirstCall(a, b);
}

/** For each call the reason of the sample that comes nearest to training it: one that trains it has an empty one. */
function untrainedReasons(samples: readonly Sample[]): ReadonlyMap<string, string> {
  const found = new Map<string, string>();
  for (const turn of samples.flatMap((sample) => sample.turns)) {
    const known = found.get(turn.callId);
    const isBetter = known === undefined || turn.untrainedReason === "" || (known === "SHARED" && turn.untrainedReason !== "");
    if (isBetter && known !== "") found.set(turn.callId, turn.untrainedReason);
  }
  return found;
}

/** All turns of a tree in the order in which it is read. */
export function turnsOf(roots: readonly TreeBranch[]): Turn[] {
  return roots.flatMap((branch) => branch.turns.flatMap((turn) => [turn, ...turnsOf(turn.branches)]));
}
