/** Metrics of runs, over all drivers: logged at one of them, listed and deleted at all. */

import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import { type Cluster, ofSeveral } from "../cluster.js";
import { type MetricPoints, RunService } from "../gen/penstock/driver/v1/run_service_pb.js";
import type { Abortable } from "../handles.js";
import type { Service } from "../rpc.js";

/** Of a list: a run may have two million points. */
const LIST_MS = 300_000;

export interface MetricPoint {
  readonly step: number;
  readonly value: number;
  /** When it was logged. */
  readonly time: Date;
}

/** One metric: its points in the order of their steps, one for each step. */
export interface Metric {
  readonly name: string;
  readonly points: readonly MetricPoint[];
}

export interface LogOptions extends Abortable {
  /** When it was measured. Default: now. */
  readonly time?: Date;
}

export interface MetricsOptions extends Abortable {
  /** Only these, at most 1024. Absent = all. */
  readonly names?: readonly string[];
  /** 3 to 10,000: thins longer metrics, at each driver, to about as many points. The least and the greatest values stay. Absent = all points. */
  readonly maxPoints?: number;
}

export interface DeleteMetricsOptions extends Abortable {
  /** Only these, at most 1024. Absent = all. */
  readonly names?: readonly string[];
  /** Points of this step and later ones. Absent = all. */
  readonly fromStep?: number;
}

/** Logs metrics of a step at the driver that ranks first for the run. */
export async function logMetrics(
  cluster: Cluster,
  runId: string,
  values: Readonly<Record<string, number>>,
  step: number,
  { time = new Date(), signal }: LogOptions = {},
): Promise<void> {
  const request = { runId, steps: [{ step: BigInt(step), values: { ...values }, time: timestampFromDate(time) }] };
  await cluster.create(
    "driver",
    runId,
    ({ service }, repeatable) => {
      const client = service.client(RunService);
      return service.call((call) => client.logMetrics(request, call), { signal, repeatable });
    },
    signal,
  );
}

/** `ps.runs`: metrics that trainers log of a run, the `runId` of rollouts. They may come before its rollouts. */
export class Runs {
  readonly #cluster: Cluster;

  constructor(cluster: Cluster) {
    this.#cluster = cluster;
  }

  /**
   * Logs metrics of a step; fulfilled once they are on the driver's disk. The last value of a step counts.
   *
   * Rejects with InvalidArgument FIELD_INVALID: `violations` name the fields; ResourceExhausted METRIC_LIMIT: the run or the namespace
   * has as much as it may.
   *
   * @param runId 1 to 63 letters, digits and `. _ / -`.
   * @param values finite numbers by name: 1 to 128 names of 1 to 128 letters, digits and `_ . / -`.
   * @param step 0 to 2^53 - 1, in any order; another number throws RangeError.
   */
  async log(runId: string, values: Readonly<Record<string, number>>, step: number, options: LogOptions = {}): Promise<void> {
    await logMetrics(this.#cluster, runId, values, step, options);
  }

  /** A run's metrics of all drivers, in the order of their names; none of a run that has none. Rejects with Unavailable: a driver is away. */
  async metrics(runId: string, { names = [], maxPoints = 0, signal }: MetricsOptions = {}): Promise<Metric[]> {
    const found = new Map<string, Map<number, MetricPoint>>();
    for (const service of await this.#services(signal)) {
      const client = service.client(RunService);
      const request = { runId, names: [...names], maxPoints };
      const options = { timeoutMs: LIST_MS };
      for (const { points } of await service.collect((call) => client.listMetrics(request, { ...call, ...options }), signal)) {
        if (points !== undefined) {
          merge(found, points);
        }
      }
    }
    const byStep = (points: ReadonlyMap<number, MetricPoint>) => [...points.values()].sort((one, other) => one.step - other.step);
    return [...found].sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, points]) => ({ name, points: byStep(points) }));
  }

  /**
   * Deletes metrics of a run at all drivers; gives how many points. A trainer that resumes from a checkpoint deletes what the last
   * attempt logged after it. May be repeated.
   */
  async deleteMetrics(runId: string, { names = [], fromStep = 0, signal }: DeleteMetricsOptions = {}): Promise<number> {
    const request = { runId, names: [...names], fromStep: BigInt(fromStep) };
    let deleted = 0;
    const services = await this.#services(signal);
    for (const service of services) {
      const client = service.client(RunService);
      const options = { signal, timeoutMs: LIST_MS, repeatable: ofSeveral(services) };
      deleted += Number((await service.call((call) => client.deleteMetrics(request, call), options)).count);
    }
    return deleted;
  }

  async #services(signal: AbortSignal | undefined): Promise<Service[]> {
    return (await this.#cluster.members("driver", { signal })).map(({ service }) => service);
  }
}

/** Of two points of a step the later one counts. */
function merge(found: Map<string, Map<number, MetricPoint>>, { name, steps, values, times }: MetricPoints): void {
  const known = found.get(name) ?? new Map<number, MetricPoint>();
  found.set(name, known);
  for (const [index, at] of steps.entries()) {
    const point = { step: Number(at), value: values[index] ?? 0, time: new Date(Number(times[index] ?? 0n) / 1000) };
    const before = known.get(point.step);
    if (before === undefined || before.time <= point.time) {
      known.set(point.step, point);
    }
  }
}
