/** A sandbox's files and the input of its processes, at a service that keeps them in memory. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { after, before, beforeEach, it } from "node:test";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { connect, type Penstock } from "../connection.js";
import { FailedPrecondition } from "../errors.js";
import { FileService } from "../gen/penstock/sandbox/v1/file_service_pb.js";
import { ProcessService } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import { SandboxService } from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";

let server: Http2Server;
const sessions: ServerHttp2Session[] = [];
let ps: Penstock;
/** What the process has been given. */
let stdin = "";
/** After how many further bytes the write fails, with which code; undefined = it does not. */
let failure: { readonly after: number; readonly code: Code } | undefined;
/** How often the process was asked for. */
let asked = 0;
/** Of the calls that write files. */
let deadlines: (number | undefined)[] = [];

before(async () => {
  server = createServer(
    connectNodeAdapter({
      routes: (router) => {
        router.service(SandboxService, { createSandbox: () => ({ sandbox: { sandboxId: "sb" } }) });
        router.service(ProcessService, {
          startProcess: ({ processId }) => ({ process: { processId, stdinOffset: BigInt(stdin.length) } }),
          getProcess: ({ processId }) => {
            asked += 1;
            return { process: { processId, stdinOffset: BigInt(stdin.length) } };
          },
          writeStdin: async (requests) => {
            let offset = 0;
            for await (const { frame } of requests) {
              if (frame.case === "start") {
                offset = Number(frame.value.offset);
                assert(offset <= stdin.length);
              } else if (frame.case === "data") {
                // As the service: what it has is skipped, without a word.
                const text = Buffer.from(frame.value).toString().slice(stdin.length - offset);
                const { after, code } = failure ?? { after: text.length, code: undefined };
                failure = undefined;
                stdin += text.slice(0, after);
                if (code !== undefined) {
                  throw new ConnectError("no", code);
                }
              }
            }
            return { offset: BigInt(stdin.length) };
          },
        });
        router.service(FileService, {
          writeFile: async (requests, context) => {
            await Array.fromAsync(requests);
            deadlines.push(context.timeoutMs());
            return {};
          },
          writeTree: async (requests, context) => {
            await Array.fromAsync(requests);
            deadlines.push(context.timeoutMs());
            return {};
          },
        });
      },
    }),
  );
  server.on("session", (session) => sessions.push(session));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  ps = connect({ addresses: { sandbox: `127.0.0.1:${(server.address() as AddressInfo).port}` }, token: "ours" });
});

after(async () => {
  await ps.close();
  for (const closing of [...sessions, server]) {
    closing.close();
  }
});

beforeEach(() => {
  [stdin, failure, asked, deadlines] = ["", undefined, 0, []];
});

it("a process gets what a handle writes that was made later, after what it had", async () => {
  const sandbox = await ps.sandboxes.create();
  stdin = "before, ";
  await sandbox.process("p").write("after");
  assert.equal(stdin, "before, after");
});

it("a process gets the whole of what is written after a write that failed", async () => {
  const sandbox = await ps.sandboxes.create();
  const process = await sandbox.start("cat", { stdin: true });
  failure = { after: 3, code: Code.FailedPrecondition };
  await assert.rejects(process.write("one two"), FailedPrecondition);
  await process.write("three");
  assert.equal(stdin, "onethree");
});

it("a process gets no byte twice of a write that broke", async () => {
  const sandbox = await ps.sandboxes.create();
  const process = await sandbox.start("cat", { stdin: true });
  failure = { after: 3, code: Code.Unavailable };
  await process.write("one two");
  await process.write(" three");
  assert.equal(stdin, "one two three");
  assert.equal(asked, 0); // the handle knows where it is
});

it("files and trees are written for as long as the caller wants", async () => {
  const sandbox = await ps.sandboxes.create();
  await sandbox.writeFile("a", "text");
  await sandbox.writeTree("b", new Uint8Array(1024));
  assert.deepEqual(deadlines, [undefined, undefined]);
});
