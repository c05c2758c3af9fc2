import assert from "node:assert/strict";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import type { Cluster } from "../cluster.js";
import { Runs } from "../driver/runs.js";
import { ListMetricsResponseSchema } from "../gen/penstock/driver/v1/run_service_pb.js";

type Point = readonly [step: number, value: number, time: number];

/** A driver that has these points of one metric. */
function driver(name: string, points: readonly Point[]) {
  const [steps, values, times] = [points.map(([step]) => BigInt(step)), points.map(([, value]) => value), points.map(([, , time]) => BigInt(time))];
  const answers = [create(ListMetricsResponseSchema, { revision: 1n }), create(ListMetricsResponseSchema, { points: { name, steps, values, times } })];
  const service = {
    client: () => ({ deleteMetrics: async () => ({ count: BigInt(points.length) }) }),
    collect: async () => answers,
    call: async (method: (options: object) => Promise<unknown>) => method({}),
  };
  return { name, service, isLost: false, takesWork: true };
}

function runsOf(...drivers: readonly ReturnType<typeof driver>[]): Runs {
  return new Runs({ members: async () => drivers } as unknown as Cluster);
}

test("metrics of several drivers are one list, in the order of names and steps", async () => {
  const found = await runsOf(driver("loss", [[1, 0.5, 10], [7, 0.1, 70]]), driver("kl", [[1, 2, 10]]), driver("loss", [[3, 0.3, 30]])).metrics("r");
  assert.deepEqual(
    found.map(({ name, points }) => [name, points.map(({ step, value }) => [step, value])]),
    [
      ["kl", [[1, 2]]],
      ["loss", [[1, 0.5], [3, 0.3], [7, 0.1]]],
    ],
  );
});

test("of two drivers' points of a step the later one counts, whichever is asked first", async () => {
  const [earlier, later] = [driver("loss", [[1, 0, 1000]]), driver("loss", [[1, 1, 2000]])];
  for (const order of [[earlier, later], [later, earlier]]) {
    const [metric] = await runsOf(...order).metrics("r");
    assert.deepEqual(metric?.points, [{ step: 1, value: 1, time: new Date(2) }]);
  }
});

test("a deletion counts what all drivers deleted", async () => {
  assert.equal(await runsOf(driver("loss", [[1, 0, 1]]), driver("loss", [[2, 0, 1], [3, 0, 1]])).deleteMetrics("r"), 3);
});

test("a step that is no whole number is refused before anything is sent", async () => {
  await assert.rejects(runsOf().log("r", { loss: 1 }, 0.5), RangeError);
});
