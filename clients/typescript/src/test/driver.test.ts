/** Waits and watches that outlast a driver which is away, and end with the client. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, it, mock } from "node:test";
import { Code, ConnectError, type ConnectRouter } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { connect, type Penstock } from "../connection.js";
import { Patience } from "../driver.js";
import { resolve } from "../endpoints.js";
import { Cancelled, NotFound, Unavailable } from "../errors.js";
import { Phase } from "../gen/penstock/driver/v1/rollout_pb.js";
import { RolloutService } from "../gen/penstock/driver/v1/rollout_service_pb.js";
import { ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { Service } from "../rpc.js";

let server: Http2Server;
let ps: Penstock;
let asked: string[] = [];
let streams = 0;
let connections: ServerHttp2Session[] = [];

/** What a service says of an id that it does not know. */
function unknown(reason: string): ConnectError {
  const error = new ConnectError("there is no lost", Code.NotFound);
  error.details.push({ desc: ErrorInfoSchema, value: { reason, domain: "penstock" } });
  return error;
}

/** Answers polls by the group's id. */
function routes(router: ConnectRouter): void {
  router.service(RolloutService, {
    getRollout: ({ rolloutId }) => ({
      rollout:
        rolloutId === "over"
          ? { rolloutId, phase: Phase.ENDED, outcome: {}, lastSequence: 4n }
          : { rolloutId, phase: Phase.RUNNING },
    }),
    // biome-ignore lint/correctness/useYield: a stream that breaks has nothing
    watchRollout: async function* ({ rolloutId }) {
      streams += 1;
      if (rolloutId === "over") {
        return;
      }
      throw streams === 1 ? new ConnectError("gone", Code.Unavailable) : unknown("ROLLOUT_UNKNOWN");
    },
    getGroup: ({ groupId }) => ({ group: { groupId } }),
    waitGroup: ({ groupId }) => {
      asked.push(groupId);
      if (groupId === "lost") {
        throw asked.length === 1 ? new ConnectError("gone", Code.Unavailable) : unknown("GROUP_UNKNOWN");
      }
      if (groupId === "away") {
        throw new ConnectError("gone", Code.Unavailable);
      }
      if (asked.length === 1) {
        throw new ConnectError("not in time", Code.DeadlineExceeded);
      }
      return { group: { groupId, ended: true } };
    },
  });
}

beforeEach(async () => {
  asked = [];
  streams = 0;
  connections = [];
  server = createServer(connectNodeAdapter({ routes }));
  server.on("session", (session) => connections.push(session.on("error", () => {})));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  ps = connect({ addresses: { driver: `127.0.0.1:${port}` }, token: "secret" });
});

afterEach(async () => {
  await ps.close();
  for (const connection of connections) {
    connection.destroy();
  }
  server.close();
});

it("asks again where a poll was not answered in its time", async () => {
  const group = await ps.groups.attach("slow");
  assert.equal((await group.wait()).ended, true);
  assert.equal(asked.length, 2);
});

it("names a driver that comes back without its state", async () => {
  const group = await ps.groups.attach("lost");
  const reasons: string[] = [];
  const noted = (error: unknown) => error instanceof NotFound && reasons.push(error.reason) > 0;
  await assert.rejects(group.wait(), noted);
  await assert.rejects(group.wait(), noted); // of one that never was away it is an unknown id
  const rollout = await ps.rollouts.attach("lost");
  await assert.rejects(async () => {
    for await (const _ of rollout.events()) {
    }
  }, noted);
  assert.deepEqual(reasons, ["HOME_LOST", "GROUP_UNKNOWN", "HOME_LOST"]);
});

it("gives no events after the last one of an ended rollout, at once", async () => {
  const rollout = await ps.rollouts.attach("over");
  for await (const event of rollout.events({ after: 4 })) {
    assert.fail(`it gave ${event.sequence}`);
  }
  assert.equal(streams, 1);
});

it("ends with the client, though the driver is waited for", async () => {
  const group = await ps.groups.attach("away");
  const waiting = assert.rejects(group.wait(), (error) => {
    return error instanceof Cancelled && error.reason === "TRANSPORT_CANCELLED";
  });
  while (asked.length < 2) {
    await new Promise((later) => setImmediate(later));
  }
  await ps.close();
  await waiting;
  await assert.rejects(group.refresh(), Cancelled);
});

it("counts nothing of the caller's own time", async () => {
  let now = 0;
  mock.method(performance, "now", () => now);
  const service = new Service("driver", resolve({ addresses: { driver: "127.0.0.1:1" } }));
  mock.method(service, "pause", async (milliseconds: number) => {
    now += milliseconds;
  });
  try {
    const patience = new Patience(service);
    const away = new Unavailable("gone", { reason: "TRANSPORT_UNAVAILABLE" });
    for (let hour = 1; hour <= 2; hour++) {
      now += 3_600_000;
      await patience.pause(away);
      patience.sign();
    }
    const begun = now;
    await assert.rejects(async () => {
      for (;;) {
        await patience.pause(away);
      }
    }, away);
    assert(now - begun > 60_000 && now - begun < 120_000);
  } finally {
    mock.restoreAll();
    service.close();
  }
});
