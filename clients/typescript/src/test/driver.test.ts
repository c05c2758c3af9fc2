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
import { Cancelled, Unavailable } from "../errors.js";
import { RolloutService } from "../gen/penstock/driver/v1/rollout_service_pb.js";
import { Service } from "../rpc.js";

let server: Http2Server;
let ps: Penstock;
let asked: string[] = [];
let connections: ServerHttp2Session[] = [];

/** Answers polls by the group's id. */
function routes(router: ConnectRouter): void {
  router.service(RolloutService, {
    getGroup: ({ groupId }) => ({ group: { groupId } }),
    waitGroup: ({ groupId }) => {
      asked.push(groupId);
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
