/** Watches of several drivers as one. */

import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import type { RolloutChanges } from "../driver/changes.js";
import { changesOfAll, Given, LOOKS, type Watched } from "../driver/merging.js";
import { Unavailable } from "../errors.js";
import { Phase, RolloutSummarySchema } from "../gen/penstock/driver/v1/rollout_pb.js";
import { pause } from "../rpc.js";

const AWAY = new Unavailable("Cannot reach the driver", { reason: "TRANSPORT_UNAVAILABLE" });

/** A message with rollouts: `e` and a number has ended and was created then, all others run. */
function rows(complete: boolean, ...ids: string[]): RolloutChanges {
  const rollouts = ids.map((rolloutId) =>
    create(
      RolloutSummarySchema,
      rolloutId.startsWith("e")
        ? { rolloutId, phase: Phase.ENDED, createTime: { seconds: BigInt(rolloutId.slice(1)) } }
        : { rolloutId, phase: Phase.RUNNING },
    ),
  );
  return { rollouts, gone: [], complete, away: [] };
}

describe("a watch of several drivers", () => {
  const usual = { ...LOOKS };

  beforeEach(() => {
    LOOKS.againMs = 0;
  });

  afterEach(() => {
    Object.assign(LOOKS, usual);
  });

  it("names what a driver that was away has no more, and not what its limit leaves out", () => {
    const cases: [limit: number | undefined, before: string[], after: string[], gone: string[]][] = [
      [undefined, ["r1", "r2", "e1", "e2"], ["r2", "e2"], ["e1", "r1"]],
      [2, ["e3", "e2"], ["e4", "e3"], []], // e2 was left out: there are more than two
      [2, ["e4", "e3", "r9"], ["e4", "e2"], ["e3", "r9"]], // e2 is older
      [2, ["e4", "e3"], ["e4"], ["e3"]], // there is no second one any more
      [0, ["r1", "e1"], [], ["r1"]],
    ];
    for (const [limit, before, after, gone] of cases) {
      const given = new Given(limit);
      given.taken(rows(true, ...before));
      given.broke();
      given.taken(rows(false, ...after)); // it breaks before its snapshot is complete
      given.broke();
      assert.deepEqual([...given.taken(rows(false, ...after)), ...given.taken(rows(true))].sort(), gone);
    }
  });

  it("remembers a bounded number of ended rollouts, the newest, and all that run", () => {
    const given = new Given();
    given.taken(rows(true, "r1"));
    for (let at = 0; at < 13_000; at++) {
      given.taken(rows(false, `e${at}`));
    }
    assert(given.ids.length <= 11_001);
    given.broke();
    assert.deepEqual([given.ids.length, given.has("r1"), given.has("e3000"), given.has("e2999")], [10_001, true, true, false]);
  });

  it("names what a driver lost while it was away, and all that was of one that left, but for what is elsewhere", async () => {
    const scripts = new Map<string, (RolloutChanges | Unavailable)[]>([
      ["d0", [rows(true, "r0")]],
      ["d1", [rows(true, "r1", "r2", "r3"), AWAY, rows(false, "r2"), rows(true, "r3")]],
    ]);
    async function* changes(address: string, signal: AbortSignal): AsyncGenerator<RolloutChanges, void> {
      const script = scripts.get(address) ?? [];
      for (let item = script.shift(); item !== undefined; item = script.shift()) {
        if (item instanceof Unavailable) {
          throw item;
        }
        yield item;
      }
      await pause(1e9, signal);
    }
    const drivers = async (): Promise<readonly Watched[]> =>
      [...scripts.keys()].map((address) => ({ address, name: address, changes: (signal) => changes(address, signal) }));
    const gone: string[][] = [];
    for await (const change of changesOfAll(drivers)) {
      if (change.gone.length > 0) {
        gone.push([...change.gone]);
        if (gone.length === 2) {
          break;
        }
        scripts.set("d2", [rows(true, "r3", "last")]);
      }
      if (change.rollouts.some(({ rolloutId }) => rolloutId === "last")) {
        scripts.delete("d1");
      }
    }
    assert.deepEqual(gone, [["r1"], ["r2"]]);
  });
});
