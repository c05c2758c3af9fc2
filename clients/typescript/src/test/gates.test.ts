/** A session over gates that follow scripts, which a driver lists. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, it } from "node:test";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, type ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { Completion } from "../completions.js";
import { connect } from "../connection.js";
import { resolve } from "../endpoints.js";
import { CallEnded } from "../errors.js";
import { leaseCalls } from "../gate/pulls.js";
import {
  type InterceptRequest,
  type InterceptResponseSchema,
  InterceptService,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";
import { MemberState, OperationsService } from "../gen/penstock/ops/v1/operations_service_pb.js";
import { Service } from "../rpc.js";
import { TIMES } from "../sessions.js";
import { duration } from "../wire.js";

type Said = NonNullable<MessageInitShape<typeof InterceptResponseSchema>["frame"]>;
type Heard = InterceptRequest["frame"];
type Script = (next: () => Promise<Heard>) => AsyncGenerator<Said, void>;

const WELCOME: Said = { case: "welcome", value: { sessionId: "s", heartbeatInterval: duration(10_000) } };
const ANSWER = Completion.ofTokens([5, 6], [-0.5, -0.25], { policyVersion: 3 });

function leased(callId: string): Said {
  return { case: "calls", value: { calls: [{ callId, leaseId: `lease of ${callId}`, rolloutId: "r" }] } };
}

/** Answers pauses and accepts results until Goodbye; tells `heard` of every frame. */
async function* serve(next: () => Promise<Heard>, heard: (frame: Heard) => void = () => {}): AsyncGenerator<Said, void> {
  for (let frame = await next(); frame.case !== undefined && frame.case !== "goodbye"; frame = await next()) {
    heard(frame);
    if (frame.case === "pause") {
      yield { case: "paused", value: { openCalls: 1 } };
    } else if (frame.case === "results") {
      yield { case: "acknowledged", value: { acceptedCallIds: frame.value.results.map(({ callId }) => callId) } };
    }
  }
}

/** Stays until the client leaves. */
const stays: Script = async function* (next) {
  await next();
  yield WELCOME;
  yield* serve(next);
};

/** Its stream breaks once `leaves` is fulfilled. */
function breaksWhen(leaves: Promise<void>): Script {
  return async function* (next) {
    await next();
    yield WELCOME;
    await leaves;
    throw new ConnectError("the gate restarts", Code.Unavailable);
  };
}

describe("a session over gates", () => {
  const usual = { ...TIMES };
  let servers: Http2Server[] = [];
  let connections: ServerHttp2Session[] = [];
  let states = new Map<string, MemberState>();

  /** A gate; the first one is the driver too. It refuses offers while `isAway` says so. */
  async function gate(
    script: Script,
    offered: string[] = [],
    resumes?: Script,
    isAway: (sessionId: string) => boolean = () => false,
  ): Promise<string> {
    const server = createServer(
      connectNodeAdapter({
        routes: (router) => {
          router.service(OperationsService, {
            getServerInfo: () => ({
              server: { name: "d0" },
              members: [...states].map(([address, state]) => ({ service: "interception", name: address, address, state })),
            }),
          });
          const scripts = [script, ...(resumes === undefined ? [] : [resumes])];
          router.service(InterceptService, {
            registerTools: ({ tools, sessionId }) => {
              if (isAway(sessionId)) {
                throw new ConnectError("the gate is away", Code.Unavailable);
              }
              offered.push(...(tools.length === 0 ? ["none"] : tools.map(({ name }) => name)));
              return {};
            },
            async *intercept(requests) {
              const current = scripts.shift();
              if (current === undefined) {
                throw new ConnectError("the gate is away", Code.Unavailable);
              }
              const frames = requests[Symbol.asyncIterator]();
              const next = async (): Promise<Heard> => {
                for (;;) {
                  const { value, done } = await frames.next();
                  const frame: Heard = done ? { case: undefined } : value.frame;
                  if (frame.case !== "heartbeat") {
                    return frame;
                  }
                }
              };
              for await (const frame of current(next)) {
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
    servers.push(server);
    return `127.0.0.1:${(server.address() as AddressInfo).port}`;
  }

  beforeEach(() => {
    Object.assign(TIMES, { goneMs: 0, lookAgainMs: 20, freshMs: 0 });
    servers = [];
    connections = [];
    states = new Map();
  });

  afterEach(() => {
    Object.assign(TIMES, usual);
    for (const connection of connections) {
      connection.destroy();
    }
    for (const server of servers) {
      server.close();
    }
  });

  it("answers each call at its gate, and has its state at both", async () => {
    const windows: number[] = [];
    const answers: string[][] = [[], []];
    const tools: string[][] = [[], []];
    for (const at of [0, 1]) {
      const script: Script = async function* (next) {
        const hello = await next();
        assert(hello.case === "hello");
        windows.push(hello.value.credits?.calls ?? 0);
        yield WELCOME;
        yield leased(`call ${at}`);
        yield* serve(next, (frame) => {
          if (frame.case === "results") {
            answers[at]?.push(...frame.value.results.map(({ callId }) => callId));
          }
        });
      };
      states.set(await gate(script, tools[at]), MemberState.UP);
    }
    const [first = ""] = states.keys();
    await using ps = connect({ addresses: { driver: first, interception: first }, token: "secret" });
    const session = await ps.intercept({ credits: 8 });
    await session.offerTools([{ name: "look_up", run: () => "" }]);
    assert.equal(await session.pause(), 2);
    for (const _ of [0, 1]) {
      await (await session.nextCall())?.deliver(ANSWER);
    }
    await session.close();
    assert.deepEqual(answers, [["call 0"], ["call 1"]]);
    assert.deepEqual(tools, [["look_up"], ["look_up"]]);
    assert(windows.reduce((sum, calls) => sum + calls, 0) <= 16);
  });

  it("outlasts a lost gate, and takes in a new one", async () => {
    const taken = Promise.withResolvers<void>();
    const heard: string[] = [];
    const breaks: Script = async function* (next) {
      await next();
      yield WELCOME;
      yield leased("a");
      await taken.promise;
      throw new ConnectError("the gate is gone", Code.Unavailable);
    };
    const joins: Script = async function* (next) {
      const hello = await next();
      assert(hello.case === "hello" && hello.value.policyVersion === 7n);
      yield WELCOME;
      yield leased("early");
      for (let frame = await next(); frame.case !== undefined && frame.case !== "goodbye"; frame = await next()) {
        heard.push(frame.case);
        if (frame.case === "results") {
          assert.equal(frame.value.results[0]?.result.case, "release");
          yield { case: "paused", value: {} };
          yield leased("late");
        }
      }
    };
    const tools: string[] = [];
    const first = await gate(stays);
    const second = await gate(breaks);
    const third = await gate(joins, tools);
    states.set(first, MemberState.UP).set(second, MemberState.UP);
    await using ps = connect({ addresses: { driver: first, interception: first }, token: "secret" });
    const session = await ps.intercept();
    const call = await session.nextCall();
    assert(call !== undefined);
    taken.resolve();
    states.set(second, MemberState.LOST);
    if (!call.ended) {
      await once(call.signal, "abort");
    }
    await assert.rejects(call.deliver(ANSWER), CallEnded);
    await session.pause("weights");
    await session.offerTools([{ name: "look_up", run: () => "" }]);
    session.announce(7);
    states.set(third, MemberState.UP);
    assert.equal((await session.nextCall())?.callId, "late");
    await session.close();
    assert.deepEqual(tools, ["look_up"]);
    assert.deepEqual(
      heard.filter((name) => name === "pause" || name === "results"),
      ["pause", "results"],
    );
  });

  it("holds the calls of a gate for which a pause did not wait, when it comes back", async () => {
    TIMES.goneMs = 30_000;
    const leaves = Promise.withResolvers<void>();
    const paused = Promise.withResolvers<void>();
    const released: string[] = [];
    const comesBack: Script = async function* (next) {
      await next();
      await paused.promise;
      yield { case: "welcome", value: { sessionId: "s", resumed: true, heartbeatInterval: duration(10_000) } };
      yield leased("early");
      for (let frame = await next(); frame.case !== undefined && frame.case !== "goodbye"; frame = await next()) {
        if (frame.case === "results") {
          released.push(...frame.value.results.filter(({ result }) => result.case === "release").map(({ callId }) => callId));
          yield { case: "paused", value: {} };
          yield leased("late");
        }
      }
    };
    const first = await gate(stays);
    const second = await gate(breaksWhen(leaves.promise), [], comesBack);
    states.set(first, MemberState.UP).set(second, MemberState.UP);
    await using ps = connect({ addresses: { driver: first, interception: first }, token: "secret" });
    const session = await ps.intercept();
    states.set(second, MemberState.LOST);
    leaves.resolve();
    await session.pause("weights");
    paused.resolve();
    assert.equal((await session.nextCall())?.callId, "late");
    await session.close();
    assert.deepEqual(released, ["early"]);
  });

  for (const resumed of [true, false]) {
    it(`withdraws tools at a gate that was away meanwhile and ${resumed ? "resumes the session" : "forgot it"}`, async () => {
      TIMES.goneMs = 30_000;
      const leaves = Promise.withResolvers<void>();
      const withdrawn = Promise.withResolvers<void>();
      let away = false;
      const comesBack: Script = async function* (next) {
        await next();
        await withdrawn.promise;
        yield { case: "welcome", value: { sessionId: "new", resumed, heartbeatInterval: duration(10_000) } };
        yield leased("late");
        yield* serve(next);
      };
      const tools: string[] = [];
      const first = await gate(stays);
      const second = await gate(breaksWhen(leaves.promise), tools, comesBack, (sessionId) => away && sessionId === "s");
      states.set(first, MemberState.UP).set(second, MemberState.UP);
      await using ps = connect({ addresses: { driver: first, interception: first }, token: "secret" });
      const session = await ps.intercept();
      await session.offerTools([{ name: "look_up", run: () => "" }]);
      away = true;
      states.set(second, MemberState.LOST);
      leaves.resolve();
      await session.offerTools([]);
      withdrawn.resolve();
      assert.equal((await session.nextCall())?.callId, "late");
      await session.close();
      assert.deepEqual(tools, resumed ? ["look_up", "none"] : ["look_up"]);
    });
  }
});

describe("leases of calls at several gates", () => {
  const servers: Http2Server[] = [];
  const services: Service[] = [];

  type Lease = NonNullable<ServiceImpl<typeof InterceptService>["leaseCalls"]>;

  async function gate(leaseCalls: Lease): Promise<Service> {
    const server = createServer(
      connectNodeAdapter({ routes: (router) => router.service(InterceptService, { leaseCalls }) }),
    );
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    servers.push(server);
    const address = `127.0.0.1:${(server.address() as AddressInfo).port}`;
    const service = new Service("interception", resolve({ addresses: { interception: address } }));
    services.push(service);
    return service;
  }

  /** Two gates. Once both are asked the first one leases a call, so that the second one is given up, and asked what it has. */
  async function two(settle: Lease): Promise<[Service, Service]> {
    const isAsked = Promise.withResolvers<void>();
    let requests = 0;
    const first = await gate(async () => {
      await isAsked.promise;
      return { calls: [{ callId: "a", leaseId: "lease", rolloutId: "r" }] };
    });
    const second = await gate(async (request, context) => {
      requests += 1;
      if (requests === 1) {
        return {}; // it has answered before
      }
      if (requests === 2) {
        isAsked.resolve();
        await once(context.signal, "abort");
        return {};
      }
      return settle(request, context);
    });
    assert.deepEqual(await leaseCalls([second], {}), []);
    return [first, second];
  }

  afterEach(() => {
    for (const closing of [...services.splice(0), ...servers.splice(0)]) {
      closing.close();
    }
  });

  it("are not held back by a gate that went away", async () => {
    let settles = 0;
    const gates = await two(() => {
      settles += 1;
      if (settles === 1) {
        throw new ConnectError("connection refused", Code.Unavailable);
      }
      return {};
    });
    const calls = await leaseCalls(gates, {});
    assert.deepEqual(
      calls.map(({ callId }) => callId),
      ["a"],
    );
    assert.equal(settles, 1);
  });

  it("are no longer asked for when the caller's signal is aborted", async () => {
    const caller = new AbortController();
    const ended = Promise.withResolvers<unknown>();
    const gates = await two(async (_, { signal }) => {
      caller.abort(new Error("enough"));
      await once(signal, "abort");
      ended.resolve(ConnectError.from(signal.reason).code);
      return {};
    });
    await assert.rejects(leaseCalls(gates, { signal: caller.signal }), /enough/);
    assert.notEqual(await ended.promise, Code.DeadlineExceeded);
  });
});
