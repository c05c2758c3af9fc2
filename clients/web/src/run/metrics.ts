// Metrics that trainers logged of runs: read from all drivers, followed by their revisions, as lines by step.
//
// Invariants: a metric has one point for each step, the last one logged; what is read and what is drawn is bounded.
import { signal, useSignal, type ReadonlySignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Code, ConnectError } from "@connectrpc/connect";
import { type ListMetricsResponse, type MetricPoints, RunService } from "@gen/penstock/driver/v1/run_service_pb";

import { explain, isCancelled, type Trouble } from "../lib/errors";
import { seesAll } from "../lib/scope";
import { client } from "../lib/transport";
import { drivers } from "../overview/feed";
import { type LinePoint, MOST_POINTS, parseRef } from "./model";

const POLL_MS = 5000;
const TIMEOUT_MS = 60_000;
/** Points of each metric that are read at first. */
const MOST_READ = 1000;
/** How many metrics are drawn, beginning with the first that match. */
export const shownCount = signal(24);

export interface Logged {
  readonly step: number;
  readonly value: number;
  /** Microseconds since 1970. */
  readonly time: number;
}

/** By name, in the order of the names; points in the order of their steps. */
export type Metrics = ReadonlyMap<string, readonly Logged[]>;
const NONE: Metrics = new Map();

interface Kept extends Logged {
  readonly driver: string;
}

/** The metrics of one run, as far as they have been read. */
export class MetricStore {
  private readonly found = new Map<string, Map<number, Kept>>();
  private readonly revisions = new Map<string, bigint>();

  constructor(private readonly namespace: string) {}

  /** The revision after which a driver is to be asked. */
  after(driver: string): bigint {
    return this.revisions.get(driver) ?? 0n;
  }

  /** Takes a whole answer of a driver, and says whether it had points. */
  take(driver: string, answer: readonly Pick<ListMetricsResponse, "revision" | "points">[]): boolean {
    let hasPoints = false;
    for (const { points } of answer) {
      if (points?.namespace !== this.namespace) continue;
      hasPoints = true;
      this.add(driver, points);
    }
    const revision = answer[0]?.revision;
    if (revision !== undefined) this.revisions.set(driver, revision);
    return hasPoints;
  }

  private add(driver: string, { name, steps, values, times }: MetricPoints): void {
    let known = this.found.get(name);
    if (!known) this.found.set(name, (known = new Map()));
    for (const [index, at] of steps.entries()) {
      const [step, value, time] = [Number(at), values[index] ?? 0, Number(times[index] ?? 0n)];
      const before = known.get(step);
      // Of two drivers' points the later one counts; a driver's own newest replaces what it had.
      if (!before || before.driver === driver || before.time <= time) known.set(step, { step, value, time, driver });
    }
  }

  get metrics(): Metrics {
    const byStep = (points: ReadonlyMap<number, Kept>) => [...points.values()].sort((a, b) => a.step - b.step);
    return new Map([...this.found].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, points]) => [name, byStep(points)]));
  }
}

/**
 * The line of a metric.
 *
 * @param window how many points count together, each with those before it: the mean is drawn, and from the least to the greatest is
 *   the band. Of many points neighbours are put together first, in the same way.
 */
export function metricLine(points: readonly Logged[], window: number): LinePoint[] {
  const together = Math.max(1, Math.ceil(points.length / MOST_POINTS));
  const pools = Array.from({ length: Math.ceil(points.length / together) }, (_, index) => points.slice(index * together, (index + 1) * together));
  return pools.map((pool, index) => {
    const values = pools.slice(Math.max(0, index - window + 1), index + 1).flatMap((one) => one.map(({ value }) => value));
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    const mean = { value: meanOf(values), low, high, count: values.length };
    return { x: pool.at(-1)?.step ?? 0, mean, own: meanOf(pool.map(({ value }) => value)), rows: [] };
  });
}

/** Each part first: the sum of numbers near the greatest that there are is none. */
const meanOf = (values: readonly number[]): number => values.reduce((sum, value) => sum + value / values.length, 0);

/** A number of any size in few characters: "0.3012", "1.2e-5", "2.5e9". */
export function short(value: number): string {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e[+]?/, "e");
  return String(Number(value.toPrecision(4)));
}

export interface Reading {
  /** One for each run. */
  readonly metrics: ReadonlySignal<readonly Metrics[]>;
  /** Why the last reading failed; null = it did not. */
  readonly trouble: ReadonlySignal<Trouble | null>;
}

/** The metrics of some runs, read again every five seconds while somebody looks. Must be given the same runs each time. */
export function useMetrics(refs: readonly string[]): Reading {
  const metrics = useSignal<readonly Metrics[]>(refs.map(() => NONE));
  const trouble = useSignal<Trouble | null>(null);
  useEffect(() => {
    const abort = new AbortController();
    const stores = refs.map((ref) => new MetricStore(parseRef(ref).namespace));
    let timer: ReturnType<typeof setTimeout> | undefined;
    const poll = async () => {
      if (!document.hidden) {
        const failed = await readAll(refs, stores, abort.signal, () => (metrics.value = stores.map((store) => store.metrics)));
        if (!abort.signal.aborted) trouble.value = failed;
      }
      if (!abort.signal.aborted) timer = setTimeout(() => void poll(), POLL_MS);
    };
    void poll();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, []);
  return { metrics, trouble };
}

async function readAll(refs: readonly string[], stores: readonly MetricStore[], abort: AbortSignal, onChange: () => void): Promise<Trouble | null> {
  let failed: Trouble | null = null;
  for (const driver of drivers.peek().length ? drivers.peek() : [""])
    for (const [index, store] of stores.entries()) {
      try {
        if (await read(parseRef(refs[index] ?? "").id, driver, store, abort)) onChange();
      } catch (error) {
        if (isCancelled(error)) return null;
        // A driver of an older version has none.
        if (ConnectError.from(error).code !== Code.Unimplemented) failed = explain(error, "read the metrics");
      }
    }
  return failed;
}

async function read(runId: string, driver: string, store: MetricStore, abort: AbortSignal): Promise<boolean> {
  const allNamespaces = await seesAll("driver");
  const request = { runId, afterRevision: store.after(driver), maxPoints: MOST_READ, allNamespaces };
  const answer: ListMetricsResponse[] = [];
  for await (const message of client(RunService, driver).listMetrics(request, { signal: abort, timeoutMs: TIMEOUT_MS })) answer.push(message);
  return store.take(driver, answer);
}
