/** A sandbox that is served elsewhere: its token is renewed before it ends. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { after, before, it } from "node:test";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { connect } from "../connection.js";
import { NotFound } from "../errors.js";
import { ProcessService } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import { SandboxService } from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";

interface Plane {
  readonly token: string;
  readonly endsInMs: number;
}

let first: Plane;
let second: Plane | undefined;
let renewed = 0;
let sent: (string | null)[] = [];
const servers: Http2Server[] = [];
const sessions: ServerHttp2Session[] = [];

async function listen(plane: () => string): Promise<string> {
  const told = ({ token, endsInMs }: Plane) => ({
    address: plane(),
    token,
    tokenExpireTime: timestampFromMs(Date.now() + endsInMs),
  });
  const server = createServer(
    connectNodeAdapter({
      routes: (router) => {
        router.service(SandboxService, {
          createSandbox: () => ({ sandbox: { sandboxId: "sb" }, dataPlane: told(first) }),
          getDataPlane: () => {
            renewed += 1;
            if (second === undefined) {
              throw new ConnectError("It is gone.", Code.NotFound);
            }
            return { dataPlane: told(second) };
          },
        });
        router.service(ProcessService, {
          run: (_, { requestHeader }) => {
            sent.push(requestHeader.get("authorization"));
            return { result: {} };
          },
        });
      },
    }),
  );
  server.on("session", (session) => sessions.push(session));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  servers.push(server);
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}

let home: string;

before(async () => {
  const there: string = await listen(() => there);
  home = await listen(() => there);
});

after(() => {
  for (const closing of [...sessions, ...servers]) {
    closing.close();
  }
});

const HOUR = 3_600_000;
for (const [name, given, next, token, asked] of [
  ["is used until it ends soon", { token: "first", endsInMs: HOUR }, undefined, "first", 0],
  ["is renewed once when it ends soon", { token: "first", endsInMs: 30_000 }, { token: "second", endsInMs: HOUR }, "second", 1],
  ["is used while it is in force though there is no new one", { token: "first", endsInMs: 30_000 }, undefined, "first", 2],
  ["is renewed when it has ended", { token: "first", endsInMs: -1000 }, { token: "second", endsInMs: HOUR }, "second", 1],
  ["that has ended fails the call where there is no new one", { token: "first", endsInMs: -1000 }, undefined, undefined, 2],
] as const) {
  it(`a sandbox's token ${name}`, async () => {
    first = given;
    second = next;
    renewed = 0;
    sent = [];
    await using ps = connect({ addresses: { sandbox: home }, token: "ours" });
    const sandbox = await ps.sandboxes.create();
    for (let turn = 0; turn < 2; turn++) {
      const running = sandbox.run("true");
      await (token === undefined ? assert.rejects(running, NotFound) : running);
    }
    assert.deepEqual(sent, token === undefined ? [] : [`Bearer ${token}`, `Bearer ${token}`]);
    assert.equal(renewed, asked);
  });
}
