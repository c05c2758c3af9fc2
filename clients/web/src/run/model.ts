// Runs: the rollouts that a trainer or an evaluation made under one run id, as figures and as points by step.
//
// Invariants: runs of two namespaces are two runs, whatever they are called; the points of a run hold each of its rollouts that has
// what the axis asks for once; what is drawn is bounded.
import { type Estimate, normalMean, shareOf } from "../lib/estimate";
import { DEFAULT_NAMESPACE, type Row } from "../overview/board";
import { groupsOf } from "../overview/groups";
import { finished, meanReward, solveRate, timesOf } from "../tasks/model";

export interface Run {
  /** As the address has it. */
  readonly ref: string;
  readonly id: string;
  readonly namespace: string;
  readonly rows: readonly Row[];
  readonly live: number;
  readonly completed: number;
  readonly failed: number;
  readonly cancelled: number;
  readonly graded: number;
  readonly reward: Estimate | null;
  readonly solved: Estimate | null;
  /** Model calls and sampled tokens. */
  readonly calls: number;
  readonly tokens: number;
  readonly agents: readonly string[];
  readonly tasks: number;
  /** The oldest and the newest policy version; null = not known. */
  readonly versions: readonly [number, number] | null;
  /** When its first rollout began, and when one began or ended last: milliseconds since the epoch. */
  readonly first: number;
  readonly last: number;
  /** Ends per minute, over its newest ends; null = there are fewer than two. */
  readonly perMinute: number | null;
}

const RATE_ENDS = 100;

/** What a run is called in addresses: its id, behind its namespace if that is not the usual one. Neither contains a colon. */
export const refOf = ({ run, namespace }: Pick<Row, "run" | "namespace">): string => (namespace === DEFAULT_NAMESPACE ? run : `${namespace}:${run}`);

/** Reads it. */
export function parseRef(ref: string): { readonly id: string; readonly namespace: string } {
  const colon = ref.lastIndexOf(":");
  return { id: ref.slice(colon + 1), namespace: colon < 0 ? DEFAULT_NAMESPACE : ref.slice(0, colon) };
}

/** The filter of the overview that shows a run's rollouts. */
export function filterOf(ref: string, ...more: readonly string[]): string {
  const { id, namespace } = parseRef(ref);
  return [`run:${id}`, ...(namespace === DEFAULT_NAMESPACE ? [] : [`namespace:${namespace}`]), ...more].join(" ");
}

/** The rows of one run. */
export const rowsOf = (rows: readonly Row[], ref: string): Row[] => rows.filter((row) => row.run !== "" && refOf(row) === ref);

/** The runs of some rows, the one that something happened in last first. Rollouts without a run are left out. */
export function runsOf(rows: readonly Row[]): Run[] {
  const found = new Map<string, Row[]>();
  for (const row of rows) {
    if (!row.run) continue;
    const ref = refOf(row);
    const known = found.get(ref);
    if (known) known.push(row);
    else found.set(ref, [row]);
  }
  return [...found].map(([ref, members]) => runOf(ref, members)).sort((a, b) => b.last - a.last || (a.ref < b.ref ? -1 : 1));
}

/** Figures over a run's rollouts. */
export function runOf(ref: string, rows: readonly Row[]): Run {
  const states = { waiting: 0, running: 0, completed: 0, failed: 0, cancelled: 0 };
  let [calls, tokens, first, last, graded] = [0, 0, Infinity, 0, 0];
  let versions: [number, number] | null = null;
  for (const row of rows) {
    states[row.state] += 1;
    calls += row.calls;
    tokens += row.sampledTokens;
    first = Math.min(first, row.created);
    last = Math.max(last, row.ended ?? row.created);
    if (row.reward !== null) graded += 1;
    if (row.versions) versions = versions ? [Math.min(versions[0], row.versions[0]), Math.max(versions[1], row.versions[1])] : [row.versions[0], row.versions[1]];
  }
  return {
    ...{ ref, ...parseRef(ref), rows, calls, tokens, versions, last, graded },
    first: rows.length ? first : 0,
    live: states.waiting + states.running,
    completed: states.completed,
    failed: states.failed,
    cancelled: states.cancelled,
    reward: meanReward(rows),
    solved: solveRate(rows),
    agents: [...new Set(rows.map((row) => row.agent))].sort(),
    tasks: new Set(rows.map((row) => row.task)).size,
    perMinute: rateOf(rows),
  };
}

function rateOf(rows: readonly Row[]): number | null {
  const ends = rows
    .flatMap((row) => (row.ended === null ? [] : [row.ended]))
    .sort((a, b) => a - b)
    .slice(-RATE_ENDS);
  const over = (ends.at(-1) ?? 0) - (ends[0] ?? 0);
  return over > 0 ? ((ends.length - 1) * 60_000) / over : null;
}

/** What the points of a run stand for. */
export type Axis = "step" | "version" | "group";
export const AXES: readonly Axis[] = ["step", "version", "group"];

/** Label of a rollout with the number of its training step. */
const STEP_LABEL = "step";
/** Rollouts without a group that are one point. */
const WINDOW = 8;
/** Points of one line; of more, neighbours are put together. */
export const MOST_POINTS = 300;

export interface RunPoint {
  readonly x: number;
  readonly rows: readonly Row[];
}

const NUMBERS: Readonly<Record<"step" | "version", (row: Row) => number | null>> = {
  step: ({ labels }) => {
    const text = Object.hasOwn(labels, STEP_LABEL) ? (labels[STEP_LABEL] ?? "") : "";
    return /^[0-9]{1,9}$/.test(text) ? Number(text) : null;
  },
  // The one that it began with.
  version: ({ versions }) => versions?.[0] ?? null,
};

/** Its rollouts by step, by policy version or by group, in order. */
export function pointsOf(rows: readonly Row[], axis: Axis): RunPoint[] {
  if (axis === "group") return bounded(byGroup(rows));
  const found = new Map<number, Row[]>();
  for (const row of rows) {
    const x = NUMBERS[axis](row);
    if (x === null) continue;
    const known = found.get(x);
    if (known) known.push(row);
    else found.set(x, [row]);
  }
  return bounded([...found].map(([x, members]) => ({ x, rows: members })).sort((a, b) => a.x - b.x));
}

/** Groups in the order in which they began; without any, every eight rollouts in the order in which they ended. */
function byGroup(rows: readonly Row[]): RunPoint[] {
  const groups = groupsOf(rows);
  if (groups.length) return groups.map((group, index) => ({ x: index + 1, rows: group.rows }));
  const ended = rows.filter((row) => row.ended !== null).sort((a, b) => (a.ended ?? 0) - (b.ended ?? 0));
  return Array.from({ length: Math.ceil(ended.length / WINDOW) }, (_, index) => ({ x: index + 1, rows: ended.slice(index * WINDOW, (index + 1) * WINDOW) }));
}

function bounded(points: readonly RunPoint[]): RunPoint[] {
  const together = Math.max(1, Math.ceil(points.length / MOST_POINTS));
  if (together === 1) return [...points];
  return Array.from({ length: Math.ceil(points.length / together) }, (_, index) => {
    const part = points.slice(index * together, (index + 1) * together);
    return { x: part.at(-1)?.x ?? 0, rows: part.flatMap((point) => point.rows) };
  });
}

/** The axis that shows most: by step where all runs have several, else by version where all have several, else by group. */
export function usualAxis(runs: readonly (readonly Row[])[]): Axis {
  const hasSeveral = (axis: "step" | "version") => runs.length > 0 && runs.every((rows) => new Set(rows.flatMap((row) => NUMBERS[axis](row) ?? [])).size > 1);
  return hasSeveral("step") ? "step" : hasSeveral("version") ? "version" : "group";
}

export interface Measure {
  readonly key: string;
  readonly name: string;
  /** What its band is; empty = it has none. */
  readonly band: string;
  readonly of: (rows: readonly Row[]) => Estimate | null;
  /** Whether it is in the page only where a rollout has it. */
  readonly isRare?: boolean;
}

/** The mean of the values of some points: of what cannot be computed from their rollouts together. */
function meanOf(found: readonly (Estimate | null)[]): Estimate | null {
  const known = found.filter((one) => one !== null);
  if (!known.length) return null;
  const value = known.reduce((sum, one) => sum + one.value, 0) / known.length;
  return { value, low: value, high: value, count: known.reduce((sum, one) => sum + one.count, 0) };
}

/** What a run is looked at by; the first is the reward. */
export const MEASURES: readonly Measure[] = [
  { key: "reward", name: "Reward", band: "95 % interval of the mean, over tasks (Wilson)", of: meanReward },
  { key: "solved", name: "Solved", band: "95 % interval of the share, over tasks (Wilson)", of: solveRate },
  {
    key: "failed",
    name: "Failed",
    band: "95 % interval of the share (Wilson)",
    of: (rows) => {
      const ended = finished(rows);
      return shareOf(ended.filter((row) => row.state === "failed").length, ended.length);
    },
  },
  { key: "calls", name: "Model calls of a rollout", band: "95 % interval of the mean", of: (rows) => normalMean(finished(rows).map((row) => row.calls)) },
  { key: "tokens", name: "Sampled tokens of a rollout", band: "95 % interval of the mean", of: (rows) => normalMean(finished(rows).map((row) => row.sampledTokens)) },
  { key: "time", name: "Time of a rollout", band: "95 % interval of the mean", of: (rows) => normalMean(timesOf(rows)) },
  { key: "entropy", name: "Sampled entropy of a token", band: "95 % interval of the mean, over rollouts, in nats", of: sampledEntropy, isRare: true },
  { key: "rate", name: "Rollouts a minute", band: "", of: throughput },
];

/**
 * The mean of minus the logprobs of the sampled tokens, each token with one weight, in nats: an estimate of the entropy of a token. Tokens
 * of one rollout are not independent, so the variance is that between rollouts (of a ratio of means).
 */
function sampledEntropy(rows: readonly Row[]): Estimate | null {
  const known = rows.filter((row) => row.logprobs !== null);
  let [sum, tokens] = [0, 0];
  for (const { logprobs } of known) if (logprobs) [sum, tokens] = [sum - logprobs.sum, tokens + logprobs.tokens];
  if (!tokens) return null;
  const value = sum / tokens;
  const size = tokens / known.length;
  const spread = normalMean(known.map(({ logprobs }) => (logprobs ? (-logprobs.sum - value * logprobs.tokens) / size : 0)));
  const half = spread ? spread.high - spread.value : 0;
  return { value, low: Math.max(0, value - half), high: value + half, count: known.length };
}

/** Those that ended, over the time from the first start to the last end. */
function throughput(rows: readonly Row[]): Estimate | null {
  let [first, last, count] = [Infinity, 0, 0];
  for (const row of rows) {
    if (row.ended === null) continue;
    first = Math.min(first, row.created);
    last = Math.max(last, row.ended);
    count += 1;
  }
  if (!count || last <= first) return null;
  const value = (count * 60_000) / (last - first);
  return { value, low: value, high: value, count };
}

/** One point of a line: the mean of the points of its window, and its own. */
export interface LinePoint {
  readonly x: number;
  readonly mean: Estimate;
  readonly own: number;
  readonly rows: readonly Row[];
}

/**
 * A line through the points.
 *
 * @param window how many points count together, each with those before it: their rollouts are pooled, so that the band is the
 *   interval of what is drawn. What has no band is the mean of theirs: a rate over several steps would count the time between them.
 */
export function lineOf(points: readonly RunPoint[], measure: Measure, window: number): LinePoint[] {
  return points.flatMap(({ x, rows }, index) => {
    const own = measure.of(rows);
    const together = points.slice(Math.max(0, index - window + 1), index + 1);
    const mean = window === 1 ? own : measure.band ? measure.of(together.flatMap((point) => point.rows)) : meanOf(together.map((point) => measure.of(point.rows)));
    return own && mean ? [{ x, mean, own: own.value, rows }] : [];
  });
}
