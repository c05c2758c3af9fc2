/** A connection that breaks, on the wire, and a service that is away. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { it, mock } from "node:test";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { resolve } from "../endpoints.js";
import { Cancelled, Unavailable } from "../errors.js";
import { ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { RolloutService } from "../gen/penstock/driver/v1/rollout_service_pb.js";
import { type Repeatable, Service } from "../rpc.js";

for (const end of ["the service", "the caller"]) {
  it(`is an error of the call, and of nothing else later, when ${end} ends it`, async () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    const server = createServer();
    const sessions: ServerHttp2Session[] = [];
    server.on("session", (session) => sessions.push(session.on("error", () => {})));
    server.on("stream", (stream) => stream.on("error", () => {}));
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    const service = new Service("driver", resolve({ addresses: { driver: `127.0.0.1:${port}` } }));
    try {
      const client = service.client(RolloutService);
      const asking = service.call((options) => client.getRollout({ rolloutId: "x" }, options), { timeoutMs: 0 });
      const rejected = assert.rejects(asking, end === "the service" ? Unavailable : Cancelled);
      await once(server, "stream");
      if (end === "the service") {
        sessions[0]?.destroy();
      } else {
        service.close();
      }
      await rejected;
      await new Promise((settled) => setImmediate(settled)); // the streams close after the connection
      mock.timers.tick(120_000); // every timer that is left runs: none may throw
    } finally {
      service.close();
      server.close();
      mock.timers.reset();
    }
  });
}

/** As of a proxy in front, or of the transport itself: without a reason. */
const AWAY = () => new ConnectError("connection refused", Code.Unavailable);
const REFUSED = () => {
  const info = { desc: ErrorInfoSchema, value: { reason: "DRAINING", domain: "penstock" } };
  return new ConnectError("no", Code.Unavailable, undefined, [info]);
};
const ATTEMPTS = 5;

for (const [name, answered, repeatable, failure, expected] of [
  ["that never answered is not waited for long", false, true, AWAY, ATTEMPTS],
  ["that says no is not waited for long", true, true, REFUSED, ATTEMPTS],
  ["that is one of several is not waited for long", true, "briefly", AWAY, ATTEMPTS],
  ["that answered before is waited for longer while it is away", true, true, AWAY, ATTEMPTS + 1],
] as [string, boolean, Repeatable, () => ConnectError, number][]) {
  it(`a service ${name}`, async () => {
    let attempts = 0;
    let failing = false;
    const getRollout = () => {
      attempts += 1;
      if (failing && attempts <= ATTEMPTS) {
        throw failure();
      }
      return { rollout: { rolloutId: "r" } };
    };
    const server = createServer(
      connectNodeAdapter({ routes: (router) => router.service(RolloutService, { getRollout }) }),
    );
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    const service = new Service("driver", resolve({ addresses: { driver: `127.0.0.1:${port}` } }));
    try {
      const client = service.client(RolloutService);
      const ask = () => service.call((options) => client.getRollout({ rolloutId: "r" }, options), { repeatable });
      if (answered) {
        await ask();
      }
      attempts = 0;
      failing = true;
      if (expected > ATTEMPTS) {
        await ask();
      } else {
        await assert.rejects(ask(), Unavailable);
      }
      assert.equal(attempts, expected);
    } finally {
      service.close();
      server.close();
    }
  });
}
