/** A connection that breaks, on the wire. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { it, mock } from "node:test";
import { resolve } from "../endpoints.js";
import { Cancelled, Unavailable } from "../errors.js";
import { RolloutService } from "../gen/penstock/driver/v1/rollout_service_pb.js";
import { Service } from "../rpc.js";

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
