/** A session against a gate that follows a script: one for each stream to come. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, it, mock } from "node:test";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { Completion } from "../completions.js";
import { connect, type Penstock } from "../connection.js";
import { SessionLost } from "../errors.js";
import {
  type InterceptRequest,
  type InterceptResponseSchema,
  InterceptService,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";
import { bytesOf, duration, milliseconds, tokenIds } from "../wire.js";

type Said = NonNullable<MessageInitShape<typeof InterceptResponseSchema>["frame"]>;

/** What a gate says on one stream; `next` gives what the client says, heartbeats apart. */
type Script = (next: () => Promise<InterceptRequest["frame"]>) => AsyncGenerator<Said, void>;

const RESTARTS = new ConnectError("the gate restarts", Code.Unavailable);

function welcome(sessionId: string, milliseconds = 10_000, resumed = false): Said {
  return { case: "welcome", value: { sessionId, resumed, heartbeatInterval: duration(milliseconds) } };
}

/** For how many milliseconds a frame asks for a pause. */
function pauseOf(frame: InterceptRequest["frame"]): number | undefined {
  assert(frame.case === "pause");
  return milliseconds(frame.value.maxDuration);
}

describe("a session", () => {
  let server: Http2Server;
  let ps: Penstock;
  let scripts: Script[] = [];
  let connections: ServerHttp2Session[] = [];
  let prompts = new Map<string, Uint8Array>();
  let fetched: string[] = [];

  beforeEach(async () => {
    prompts = new Map();
    fetched = [];
    scripts = [];
    connections = [];
    server = createServer(
      connectNodeAdapter({
        routes: (router) => {
          router.service(InterceptService, {
            getCall: ({ callId }) => {
              fetched.push(callId);
              return { promptTokenIds: prompts.get(callId) ?? new Uint8Array() };
            },
            async *intercept(requests) {
              const frames = requests[Symbol.asyncIterator]();
              const next = async () => {
                for (;;) {
                  const { value, done } = await frames.next();
                  const frame: InterceptRequest["frame"] = done ? { case: undefined } : value.frame;
                  if (frame.case !== "heartbeat") {
                    return frame;
                  }
                }
              };
              const script = scripts.shift();
              assert(script !== undefined, "one stream too many");
              for await (const frame of script(next)) {
                yield { frame };
              }
            },
          });
        },
      }),
    );
    server.on("session", (session) => connections.push(session.on("error", () => {})));
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    ps = connect({ addresses: { interception: `127.0.0.1:${port}` }, token: "secret" });
  });

  afterEach(async () => {
    for (const connection of connections) {
      connection.destroy();
    }
    server.close();
    await ps.close();
    assert.deepEqual(scripts, [], "streams that never came");
  });

  it("hands out whole prompts, of which only the rest was sent", async () => {
    prompts = new Map([
      ["c1", bytesOf(Int32Array.of(1, 2, 3))],
      ["c2", bytesOf(Int32Array.of(1, 2, 3, 5, 6, 7))],
      ["c3", bytesOf(Int32Array.of(1, 2, 9))],
      ["c4", bytesOf(Int32Array.of(4, 4, 4))],
    ]);
    const sent = (callId: string, parentCallId?: string, omittedPrefixCount = 0, branchId = "b1") => {
      const whole = prompts.get(callId) as Uint8Array;
      const promptTokenIds = whole.subarray(4 * omittedPrefixCount);
      const promptSha256 = createHash("sha256").update(whole).digest();
      return { callId, rolloutId: "r1", branchId, parentCallId, promptTokenIds, omittedPrefixCount, promptSha256 };
    };
    scripts.push(async function* (next) {
      const hello = await next();
      assert(hello.case === "hello" && hello.value.view?.suffixOnly);
      yield welcome("s1");
      yield { case: "calls", value: { calls: [sent("c1"), sent("c2", "c1", 3), sent("c3", "c2", 2, "b2")] } };
      yield { case: "calls", value: { calls: [sent("c4", "c1", 3)] } };
      await next();
    });
    const session = await ps.intercept();
    const given: number[][] = [];
    for await (const call of session.calls()) {
      given.push([...call.promptTokenIds]);
      if (given.length === 4) {
        break;
      }
    }
    assert.deepEqual(
      given,
      [...prompts.values()].map((whole) => [...tokenIds(whole)]),
    );
    assert.deepEqual(fetched, ["c4"], "c1 is not its branch's last call any more");
    await session.close();
  });

  it("says after Welcome what was said between Hello and Welcome, once", async () => {
    const [broken, greeted, answered] = [1, 2, 3].map(() => Promise.withResolvers<void>());
    assert(broken && greeted && answered);
    const seen: unknown[] = [];
    scripts = [
      async function* (next) {
        await next();
        yield welcome("first");
        await broken.promise;
        throw RESTARTS;
      },
      async function* (next) {
        const hello = await next();
        assert(hello.case === "hello" && hello.value.policyVersion === undefined);
        greeted.resolve();
        await answered.promise;
        yield welcome("second");
        for (let frame = await next(); frame.case !== "goodbye"; frame = await next()) {
          assert(frame.case !== undefined);
          seen.push(frame.case);
          if (frame.case === "pause") {
            yield { case: "paused", value: {} };
          }
        }
      },
    ];
    const session = await ps.intercept();
    broken.resolve();
    await greeted.promise;
    session.announce(7);
    session.setCredits(3);
    const paused = session.pause("sync");
    answered.resolve();
    await paused;
    await session.close();
    assert.deepEqual(seen, ["policy", "credits", "pause"]);
  });

  it("asks again for its pause, of which it says what is left, of a gate that resumes the session", async () => {
    const broken = Promise.withResolvers<void>();
    const left: (number | undefined)[] = [];
    scripts = [
      async function* (next) {
        await next();
        yield welcome("first");
        left.push(pauseOf(await next()));
        yield { case: "paused", value: {} };
        await broken.promise;
        throw RESTARTS;
      },
      async function* (next) {
        await next();
        yield welcome("first", 10_000, true); // it was killed: its journal has the session and no pause
        yield { case: "calls", value: { calls: [{ callId: "early", leaseId: "l", rolloutId: "r" }] } };
        left.push(pauseOf(await next()));
        const frame = await next();
        assert(frame.case === "results" && frame.value.results[0]?.result.case === "release");
        yield { case: "paused", value: {} };
        yield { case: "calls", value: { calls: [{ callId: "late", leaseId: "l", rolloutId: "r" }] } };
        await next();
      },
    ];
    const session = await ps.intercept();
    await session.pause("weights", 90_000);
    broken.resolve();
    assert.equal((await session.nextCall())?.callId, "late");
    await session.close();
    assert(left[0] === 90_000 && left[1] !== undefined && left[1] > 0 && left[1] <= 90_000);
  });

  it("does not wait to connect again when it is closed", async () => {
    const over = once(server, "stream").then(async ([stream]) => once(stream, "close"));
    scripts = [
      async function* (next) {
        await next();
        yield welcome("first");
        yield { case: "goAway", value: { reason: "moving", retryAfter: { seconds: 3600n } } };
        throw RESTARTS;
      },
    ];
    const session = await ps.intercept();
    const call = session.nextCall();
    await over;
    await new Promise((settled) => setImmediate(settled)); // it waits for an hour now, or is about to
    mock.timers.enable({ apis: ["setTimeout"] }); // so that its own deadline never comes
    await session.close();
    mock.timers.reset();
    assert.equal(await call, undefined);
    await assert.rejects(session.pause(), SessionLost);
  });

  it("notices a gate that is silent while a result is being written", async () => {
    const delivered = Promise.withResolvers<void>();
    scripts = [
      async function* (next) {
        await next();
        yield welcome("first", 20);
        yield { case: "calls", value: { calls: [{ callId: "a", leaseId: "l", rolloutId: "r" }] } };
        await delivered.promise; // it reads nothing any more
      },
      async function* (next) {
        await next();
        yield welcome("first", 10_000, true);
        const frame = await next();
        assert(frame.case === "results" && frame.value.results[0]?.callId === "a");
        yield { case: "acknowledged", value: { acceptedCallIds: ["a"] } };
        delivered.resolve();
        await next(); // Goodbye
      },
    ];
    const session = await ps.intercept();
    const call = await session.nextCall();
    await call?.deliver(Completion.ofTokens(new Int32Array(1 << 20)));
    await session.close();
  });
});
