/** Which member is asked, and what happens where none can be. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, it, mock } from "node:test";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { Cluster } from "../cluster.js";
import { connect } from "../connection.js";
import { resolve, type ServiceName } from "../endpoints.js";
import { ConfigurationError, Unavailable } from "../errors.js";
import { type MemberSchema, MemberState, OperationsService } from "../gen/penstock/ops/v1/operations_service_pb.js";
import { FileService } from "../gen/penstock/sandbox/v1/file_service_pb.js";
import { Service } from "../rpc.js";

type Listed = MessageInitShape<typeof MemberSchema>;

const AWAY = () => new ConnectError("connection refused", Code.Unavailable);
const DRAINING = () => new Unavailable("It drains.", { reason: "DRAINING" });

describe("the members of a cluster", () => {
  const usual = performance.now.bind(performance);
  let servers: Http2Server[] = [];
  let connections: ServerHttp2Session[] = [];
  let opened: { close(): void }[] = [];
  let listed: Listed[] = [];
  /** By driver, how often it was asked. */
  let asked = new Map<string, number>();
  /** How many requests of drivers fail. */
  let failing = 0;
  /** By how much the clock is ahead. */
  let aheadMs = 0;

  async function driver(name: string): Promise<string> {
    const getServerInfo = () => {
      asked.set(name, (asked.get(name) ?? 0) + 1);
      if (failing > 0) {
        failing -= 1;
        throw AWAY();
      }
      return { server: { name }, members: listed };
    };
    const routes = connectNodeAdapter({ routes: (router) => router.service(OperationsService, { getServerInfo }) });
    const server = createServer(routes);
    server.on("session", (session) => connections.push(session.on("error", () => {})));
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    servers.push(server);
    return `127.0.0.1:${(server.address() as AddressInfo).port}`;
  }

  function clusterAt(address: string): Cluster {
    const endpoints = resolve({ addresses: { driver: address }, token: "secret" });
    const given = new Map<ServiceName, Service>();
    const cluster = new Cluster(endpoints, (kind) => {
      const service = given.get(kind) ?? new Service(kind, endpoints);
      given.set(kind, service);
      return service;
    });
    opened.push(cluster, { close: () => given.forEach((service) => service.close()) });
    return cluster;
  }

  function list(service: ServiceName, ...addresses: string[]): void {
    listed = addresses.map((address, at) => ({ service, name: `d${at}`, address, state: MemberState.UP }));
  }

  beforeEach(() => {
    [servers, connections, opened, listed] = [[], [], [], []];
    asked = new Map();
    failing = 0;
    aheadMs = 0;
    mock.method(performance, "now", () => usual() + aheadMs);
  });

  afterEach(() => {
    mock.restoreAll();
    for (const item of [...opened, ...servers]) {
      item.close();
    }
    for (const connection of connections) {
      connection.destroy();
    }
  });

  it("come to who waits for a driver, though who does not wait got an error meanwhile", async () => {
    const cluster = clusterAt(await driver("d0"));
    failing = 2;
    const hurried = assert.rejects(cluster.members("driver", { patient: false }), Unavailable);
    const [only] = await cluster.members("driver");
    await hurried;
    assert.equal(only?.service.address, cluster.given("driver").service.address);
  });

  it("are asked for once while all drivers are away, each driver once", async () => {
    const first = await driver("d0");
    const second = await driver("d1");
    list("driver", first, second);
    const cluster = clusterAt(first);
    await cluster.members("driver");
    aheadMs = 10_000;
    failing = Number.POSITIVE_INFINITY;
    asked.clear();
    for (const _ of [0, 1, 2]) {
      assert.equal((await cluster.members("driver")).length, 2);
    }
    assert.deepEqual([...asked], [["d0", 1], ["d1", 1]]);
    aheadMs = 20_000;
    await cluster.members("driver");
    assert.deepEqual([...asked], [["d0", 2], ["d1", 2]]);
  });

  it("make something new as soon as one of them drains no more", async () => {
    const cluster = clusterAt(await driver("d0"));
    list("sandbox", "127.0.0.1:1", "127.0.0.1:2");
    const refused: string[] = [];
    const make = async ({ service }: { service: Service }) => {
      if (refused.length < 5) {
        refused.push(service.address);
        throw DRAINING();
      }
      return "made";
    };
    const [, made] = await cluster.create("sandbox", "", make);
    assert.equal(made, "made");
    assert.equal(new Set(refused).size, 2);
  });

  it("are not waited for longer than a minute while all of them drain", async () => {
    const cluster = clusterAt(await driver("d0"));
    list("sandbox", "127.0.0.1:1", "127.0.0.1:2");
    let attempts = 0;
    const make = async () => {
      attempts += 1;
      aheadMs += 25_000;
      throw DRAINING();
    };
    await assert.rejects(cluster.create("sandbox", "", make), Unavailable);
    assert.equal(attempts, 3);
  });

  it("do not outlast the caller's signal while all of them drain", async () => {
    const cluster = clusterAt(await driver("d0"));
    list("sandbox", "127.0.0.1:1", "127.0.0.1:2");
    const caller = new AbortController();
    let attempts = 0;
    const make = async () => {
      attempts += 1;
      if (attempts === 3) {
        caller.abort(new Error("enough"));
      }
      throw DRAINING();
    };
    await assert.rejects(cluster.create("sandbox", "", make, caller.signal), /enough/);
    assert.equal(attempts, 3);
  });

  it("are asked once for something new where there is only one, whose calls are repeated while it drains", async () => {
    const cluster = clusterAt(await driver("d0"));
    list("sandbox", "127.0.0.1:1");
    let attempts = 0;
    const make = async () => {
      attempts += 1;
      throw DRAINING();
    };
    await assert.rejects(cluster.create("sandbox", "", make), Unavailable);
    assert.equal(attempts, 1);
  });
});

describe("a service without an address", () => {
  const isNone = (error: unknown) => error instanceof ConfigurationError && error.reason === "NO_SERVICE";

  it("fails what needs it, and nothing else", async () => {
    await using ps = connect({ addresses: { driver: "", interception: "", sandbox: "127.0.0.1:1" } });
    await assert.rejects(ps.rollouts.get("r"), isNone);
    await assert.rejects(ps.rollouts.list().next(), isNone);
    await assert.rejects(ps.rollouts.export().next(), isNone);
    await assert.rejects(ps.rollouts.watch().next(), isNone);
    await assert.rejects(ps.agents.list().next(), isNone);
    await assert.rejects(ps.leaseCalls(), isNone);
    await assert.rejects(ps.intercept(), isNone);
    await assert.rejects(ps.serverInfo("interception"), isNone);
    await assert.rejects(ps.sandboxes.backends(), Unavailable);
  });

  it("fails streams of requests too", async () => {
    await using ps = connect({ addresses: { sandbox: "", driver: "127.0.0.1:1" } });
    const service = ps.service("sandbox");
    const client = service.client(FileService);
    async function* frames() {}
    await assert.rejects(service.push((call) => client.writeFile(frames(), call)), isNone);
  });
});
