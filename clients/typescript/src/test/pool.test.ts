/** More calls at once than a service takes on one connection. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type ServerHttp2Stream } from "node:http2";
import type { AddressInfo } from "node:net";
import { it } from "node:test";
import { Http2SessionManager } from "@connectrpc/connect-node";
import { Pool } from "../pool.js";

const CALLS = 600;

it("opens a connection for the calls that the others have no place for, and none of 600 waits", async () => {
  const server = createServer({ settings: { maxConcurrentStreams: 256 } });
  server.on("session", (session) => session.on("error", () => {})); // the connections end before it does
  const waiting: ServerHttp2Stream[] = [];
  const arrived = new Promise<void>((all) => {
    server.on("stream", (stream) => {
      waiting.push(stream.resume());
      if (waiting.length === CALLS) {
        all(); // nobody is answered while one of them waits for a place
      }
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  const pool = new Pool(() => new Http2SessionManager(`http://127.0.0.1:${port}`));
  try {
    const calls = Array.from({ length: CALLS }, () => pool.request("POST", "/", {}, {}));
    await arrived;
    assert.equal(new Set(waiting.map(({ session }) => session)).size, 3);
    assert.deepEqual(pool.calls, [200, 200, 200]);
    const closed = calls.map(async (call) => once((await call).resume(), "close"));
    for (const stream of waiting) {
      stream.respond({}, { endStream: true });
    }
    for (const call of calls) {
      (await call).end();
    }
    await Promise.all(closed);
    assert.deepEqual(pool.calls, [0, 0, 0]);
  } finally {
    pool.abort();
    server.close();
  }
});

it("counts no call that could not be made", async () => {
  const server = createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  await new Promise((closed) => server.close(closed));
  const pool = new Pool(() => new Http2SessionManager(`http://127.0.0.1:${port}`));
  await assert.rejects(pool.request("POST", "/", {}, {}), /ECONNREFUSED/);
  assert.deepEqual(pool.calls, [0]);
  pool.abort();
});
