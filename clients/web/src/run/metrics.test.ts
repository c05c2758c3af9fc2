import { create } from "@bufbuild/protobuf";
import { createConnectRouter } from "@connectrpc/connect";
import { ListMetricsResponseSchema, RunService } from "@gen/penstock/driver/v1/run_service_pb";
import fc from "fast-check";
import { h } from "preact";
import { afterEach, describe, expect, test, vi } from "vitest";

import { drawn } from "../testing/drawn";
import { answeredBy } from "../testing/services";
import { drivers } from "../overview/feed";
import { ticks } from "../ui/plot";
import { metricLine, MetricStore, short, useMetrics } from "./metrics";
import { MOST_POINTS } from "./model";

type Point = readonly [step: number, value: number, time?: number];

function answer(revision: number, name: string, points: readonly Point[], namespace = "default") {
  const about = {
    ...{ namespace, name, steps: points.map(([step]) => BigInt(step)), values: points.map(([, value]) => value) },
    times: points.map(([, , time]) => BigInt(time ?? 1)),
  };
  return [create(ListMetricsResponseSchema, { revision: BigInt(revision) }), create(ListMetricsResponseSchema, { points: about })];
}

const shown = (store: MetricStore) => Object.fromEntries([...store.metrics].map(([name, points]) => [name, points.map(({ step, value }) => [step, value])]));

describe("the metrics of a run", () => {
  test("are in the order of their names and steps, and the last value of a step counts", () => {
    const store = new MetricStore("default");
    expect(store.take("", answer(5, "loss", [[3, 0.3, 9], [1, 0.1]]))).toBe(true);
    store.take("", answer(6, "kl", [[1, 7]]));
    store.take("", answer(7, "loss", [[3, 0.25, 2]]));
    expect(shown(store)).toEqual({ kl: [[1, 7]], loss: [[1, 0.1], [3, 0.25]] });
    expect(Object.keys(shown(store))).toEqual(["kl", "loss"]);
  });

  test("are asked for after what each driver has answered", () => {
    const store = new MetricStore("default");
    store.take("d0", answer(5, "loss", [[1, 1]]));
    expect(store.take("d1", answer(3, "loss", [[1, 2]], "another"))).toBe(false);
    expect([store.after("d0"), store.after("d1"), store.after("d2")]).toEqual([5n, 3n, 0n]);
  });

  test("are the later one's where two drivers have a step, whichever is read first", () => {
    for (const order of [["d0", "d1"], ["d1", "d0"]]) {
      const store = new MetricStore("default");
      for (const driver of order) store.take(driver, answer(1, "loss", [[1, driver === "d0" ? 0 : 1, driver === "d0" ? 10 : 20]]));
      expect(shown(store)).toEqual({ loss: [[1, 1]] });
    }
  });

  test("have no part of another namespace's run", () => {
    const store = new MetricStore("team-a");
    store.take("", answer(1, "loss", [[1, 1]]));
    expect(shown(store)).toEqual({});
  });

  test("are read from every driver, also from those whose rollouts are not shown", async () => {
    const names = ["d0", "d1", "d2", "d3", "d4", "d5"];
    const asked: (string | null)[] = [];
    let answered = (): void => {};
    const all = new Promise<void>((resolve) => (answered = resolve));
    const router = createConnectRouter().service(RunService, {
      async *listMetrics(_, { requestHeader }) {
        asked.push(requestHeader.get("penstock-member"));
        if (asked.length === names.length) answered();
        yield* answer(1, "loss", [[1, asked.length]]);
      },
    });
    answeredBy(router);
    drivers.value = names;
    const page = await drawn(h(() => (useMetrics(["run-1"]), null), {}));
    await all;
    expect(asked).toEqual(names);
    await page.leave();
  });
});

afterEach(() => vi.unstubAllGlobals());

const finite = fc.double({ noNaN: true, noDefaultInfinity: true });
const logged = fc.array(finite, { minLength: 1, maxLength: 900 }).map((values) => values.map((value, step) => ({ step: step * 2, value, time: 1 })));

describe("the line of a metric", () => {
  test("is bounded, ends where the metric ends, and its bands hold every value", () => {
    fc.assert(
      fc.property(logged, fc.integer({ min: 1, max: 25 }), (points, window) => {
        const line = metricLine(points, window);
        expect(line.length).toBeLessThanOrEqual(MOST_POINTS);
        expect(line.at(-1)?.x).toBe(points.at(-1)?.step);
        for (const { mean } of line) expect(mean.low <= mean.high && Number.isFinite(mean.value)).toBe(true);
        const values = points.map(({ value }) => value);
        expect(Math.min(...line.map(({ mean }) => mean.low))).toBe(Math.min(...values));
        expect(Math.max(...line.map(({ mean }) => mean.high))).toBe(Math.max(...values));
      }),
    );
  });

  test("is the metric itself where it is short and not smoothed", () => {
    const line = metricLine([{ step: 1, value: 2, time: 1 }, { step: 4, value: -3, time: 1 }], 1);
    expect(line.map(({ x, own, mean }) => [x, own, mean.low, mean.high])).toEqual([[1, 2, 2, 2], [4, -3, -3, -3]]);
  });

  test("is the mean of the points of its window", () => {
    const points = [0, 10, 20].map((value, step) => ({ step, value, time: 1 }));
    expect(metricLine(points, 2).map(({ mean }) => [mean.value, mean.low, mean.high, mean.count])).toEqual([[0, 0, 0, 1], [5, 0, 10, 2], [15, 10, 20, 2]]);
  });
});

test("numbers of every size are short", () => {
  expect([0, 0.30123, 1.2e-5, 1e-6, 31_400, -2.5e9, 100.25].map(short)).toEqual(["0", "0.3012", "1.2e-5", "1e-6", "31400", "-2.5e9", "100.3"]);
});

test("a scale ends for any two numbers, also where a step is lost in their size", () => {
  expect(ticks(1e16, 1e16 + 2).length).toBeLessThan(12);
  fc.assert(fc.property(finite, finite, (one, other) => ticks(Math.min(one, other), Math.max(one, other)).length < 12));
});
