import { createConnectRouter } from "@connectrpc/connect";
import { effect, type ReadonlySignal } from "@preact/signals";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { RolloutService, type WatchRolloutsRequest } from "@gen/penstock/driver/v1/rollout_service_pb";
import { OperationsService } from "@gen/penstock/ops/v1/operations_service_pb";

import { answeredBy } from "../testing/services";

let listed: string[] = [];
/** The drivers that were watched, by the header that names them. */
let watched: (string | null)[] = [];
let asked: WatchRolloutsRequest[] = [];

beforeEach(() => {
  watched = [];
  asked = [];
  const router = createConnectRouter()
    .service(OperationsService, { getServerInfo: () => ({ members: listed.map((name) => ({ service: "driver", name })) }) })
    .service(RolloutService, {
      async *watchRollouts(request, { requestHeader, signal }) {
        const name = requestHeader.get("penstock-member");
        watched.push(name);
        asked.push(request);
        yield { rollouts: [{ rolloutId: `of ${name ?? "the only one"}`, home: { driver: name ?? "" } }], snapshotComplete: true };
        await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
      },
    });
  answeredBy(router);
  vi.resetModules();
});
afterEach(() => vi.unstubAllGlobals());

function until<T>(of: ReadonlySignal<T>, isWanted: (value: T) => boolean): Promise<T> {
  return new Promise((resolve) => {
    const stop = effect(() => {
      if (isWanted(of.value)) queueMicrotask(() => (stop(), resolve(of.peek())));
    });
  });
}

describe("the rows of all drivers", () => {
  test.each<[string[], (string | null)[]]>([
    [[], [null]],
    [["d0", "d1"], ["d0", "d1"]],
    [["d0", "d1", "d2", "d3", "d4"], ["d0", "d1", "d2", "d3"]],
  ])("of drivers %j come from %j", async (names, asked) => {
    listed = names;
    const feed = await import("./feed");
    const stop = feed.newest.watch();
    const rows = await until(feed.newest.rows, (all) => all.length === asked.length);
    expect(rows.map((row) => row.id).sort()).toEqual(asked.map((name) => `of ${name ?? "the only one"}`));
    await until(feed.newest.complete, (isComplete) => isComplete);
    expect(watched.sort()).toEqual(asked);
    stop();
  });

  test("are of the driver that is asked for by name", async () => {
    listed = ["d0", "d1", "d2", "d3", "d4"];
    const feed = await import("./feed");
    const stop = feed.newest.watch();
    await until(feed.newest.rows, (all) => all.length === feed.MOST_DRIVERS);
    feed.wanted.value = "d4";
    const rows = await until(feed.newest.rows, (all) => all.length === 1);
    expect(rows.map((row) => row.id)).toEqual(["of d4"]);
    stop();
  });

  test.each([
    { run: "run-7", filter: ["run-7", undefined] },
    { task: "fix", filter: [undefined, "fix"] },
  ])("are those of $run$task, if it is asked for them, and their number is bounded", async ({ filter: wanted, ...of }) => {
    listed = [];
    const { Feed } = await import("./feed");
    const feed = new Feed(1, of);
    const stop = feed.watch();
    await until(feed.complete, (isComplete) => isComplete);
    expect(asked.map(({ endedLimit, filter }) => [endedLimit, filter?.runId, filter?.taskId])).toEqual([[1, ...wanted]]);
    expect(feed.isFull.peek()).toBe(false);
    stop();
  });
});
