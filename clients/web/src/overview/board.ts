// All rollouts that the page knows, by id: what the stream of rows sent last.
//
// Invariants: after a break the rows of the new snapshot replace the old ones, and those that did not come again are dropped when it is
// complete; of those that have ended no more than the limit are kept, the newest; applying a message costs its own size, not that of the
// board.
import { timestampMs } from "@bufbuild/protobuf/wkt";
import { FailureCause, Party, Phase, type RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";
import type { WatchRolloutsResponse } from "@gen/penstock/driver/v1/rollout_service_pb";

/** The namespace of those who name none. */
export const DEFAULT_NAMESPACE = "default";

export type State = "waiting" | "running" | "completed" | "failed" | "cancelled";

/** One rollout, ready to be shown. */
export interface Row {
  readonly id: string;
  readonly namespace: string;
  /** The name of the driver that has it; empty = it has none. */
  readonly driver: string;
  readonly group: string;
  readonly index: number;
  readonly run: string;
  readonly task: string;
  readonly agent: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly state: State;
  readonly phase: Phase;
  readonly paused: boolean;
  /** Milliseconds since the epoch. */
  readonly created: number;
  readonly ended: number | null;
  readonly attempts: number;
  /** Why it failed, in stable words; empty = it did not. */
  readonly reason: string;
  readonly cause: string;
  readonly party: string;
  readonly message: string;
  readonly reward: number | null;
  /** The least and the most that its reward could be; null = it has none. */
  readonly range: readonly [number, number] | null;
  readonly calls: number;
  readonly promptTokens: number;
  readonly sampledTokens: number;
  /** The sum of the logprobs of the sampled tokens that came with one, and their number, more than 0; null = none did. */
  readonly logprobs: { readonly sum: number; readonly tokens: number } | null;
  /** Oldest and newest policy version; null = none was reported. */
  readonly versions: readonly [number, number] | null;
}

export const PHASE_NAMES: Readonly<Record<Phase, string>> = {
  [Phase.UNSPECIFIED]: "unknown",
  [Phase.QUEUED]: "queued",
  [Phase.PREPARING]: "preparing",
  [Phase.CONFIGURING]: "configuring",
  [Phase.SETTING_UP]: "setting up",
  [Phase.RUNNING]: "agent runs",
  [Phase.VERIFYING]: "verifying",
  [Phase.COLLECTING]: "collecting",
  [Phase.ENDED]: "ended",
};

function stateOf(summary: RolloutSummary): State {
  if (summary.phase === Phase.QUEUED) return "waiting";
  if (summary.phase !== Phase.ENDED) return "running";
  if (!summary.failure) return summary.endTime ? "completed" : "running";
  return summary.failure.cause === FailureCause.CANCELLED ? "cancelled" : "failed";
}

/** A row of the wire as it is shown. */
export function rowOf(summary: RolloutSummary): Row {
  const { calls, failure } = summary;
  const newest = calls?.newestPolicyVersion;
  const oldest = calls?.oldestPolicyVersion;
  return {
    id: summary.rolloutId,
    namespace: summary.namespace || DEFAULT_NAMESPACE,
    driver: summary.home?.driver ?? "",
    group: summary.groupId ?? "",
    index: summary.index,
    run: summary.runId ?? "",
    task: summary.taskId,
    agent: summary.agent,
    labels: summary.labels,
    state: stateOf(summary),
    phase: summary.phase,
    paused: summary.paused,
    created: summary.createTime ? timestampMs(summary.createTime) : 0,
    ended: summary.endTime ? timestampMs(summary.endTime) : null,
    attempts: summary.attempts,
    reason: failure?.reason ?? "",
    cause: failure ? (FailureCause[failure.cause] ?? "").toLowerCase() : "",
    party: failure ? (Party[failure.causedBy] ?? "").toLowerCase() : "",
    message: failure?.message ?? "",
    reward: summary.reward?.value ?? null,
    range: summary.reward ? [summary.reward.rangeMin, summary.reward.rangeMax] : null,
    calls: calls?.calls ?? 0,
    promptTokens: Number(calls?.promptTokens ?? 0n),
    sampledTokens: Number(calls?.completionTokens ?? 0n),
    logprobs: calls && calls.logprobCount > 0n ? { sum: calls.logprobSum, tokens: Number(calls.logprobCount) } : null,
    versions: newest === undefined || oldest === undefined ? null : [Number(oldest), Number(newest)],
  };
}

/** The rows of some boards, newest first; those of one group in the order of their index. */
export function listed(boards: Iterable<Board>): Row[] {
  return [...boards].flatMap((board) => [...board.values()]).sort((a, b) => b.created - a.created || a.index - b.index || (a.id < b.id ? -1 : 1));
}

/** What `apply` reads of a message; a stream that was opened anew begins with `begin`. */
export class Board {
  private rows = new Map<string, Row>();
  /** Those that have ended, the oldest end first. */
  private ended = new Set<string>();
  private fresh: Set<string> | null = null;
  /** Whether the first snapshot is complete. */
  complete = false;

  /** @param endedLimit of those that have ended, as many as the stream was asked for. */
  constructor(private readonly endedLimit = Infinity) {}

  /** A stream begins: what it sends until its snapshot is complete is all that there is. */
  begin(): void {
    this.fresh = new Set();
  }

  /** Takes a message; whether anything is different now. */
  apply(message: Pick<WatchRolloutsResponse, "rollouts" | "goneRolloutIds" | "snapshotComplete">): boolean {
    for (const summary of message.rollouts) {
      this.rows.set(summary.rolloutId, rowOf(summary));
      if (summary.phase === Phase.ENDED) this.ended.add(summary.rolloutId);
      else this.ended.delete(summary.rolloutId);
      this.fresh?.add(summary.rolloutId);
    }
    for (const id of message.goneRolloutIds) this.drop(id);
    if (message.snapshotComplete) {
      const told = this.fresh;
      if (told) for (const id of this.rows.keys()) if (!told.has(id)) this.drop(id);
      this.ended = new Set([...this.ended].sort((a, b) => this.endOf(a) - this.endOf(b))); // a snapshot comes in any order
      this.fresh = null;
      this.complete = true;
    }
    if (this.complete && !this.fresh)
      for (const id of this.ended) {
        if (this.ended.size <= this.endedLimit) break;
        this.drop(id);
      }
    return message.rollouts.length > 0 || message.goneRolloutIds.length > 0 || message.snapshotComplete;
  }

  private drop(id: string): void {
    this.rows.delete(id);
    this.ended.delete(id);
  }

  private endOf(id: string): number {
    const row = this.rows.get(id);
    return row?.ended ?? row?.created ?? 0;
  }

  /** All of them, in no order. */
  values(): Iterable<Row> {
    return this.rows.values();
  }

  /** How many of them have ended. */
  get endedCount(): number {
    return this.ended.size;
  }
}
