/** The headers that route each RPC. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingHttpHeaders } from "node:http2";
import type { AddressInfo } from "node:net";
import { after, before, it } from "node:test";
import { create, type DescMethod, getOption, type Message } from "@bufbuild/protobuf";
import { type ReflectMessage, reflect } from "@bufbuild/protobuf/reflect";
import { resolve } from "../endpoints.js";
import { AgentService } from "../gen/penstock/driver/v1/agent_service_pb.js";
import { RolloutService } from "../gen/penstock/driver/v1/rollout_service_pb.js";
import { TerminalService } from "../gen/penstock/driver/v1/terminal_service_pb.js";
import { InferenceService } from "../gen/penstock/inference/v1/inference_service_pb.js";
import { InterceptService } from "../gen/penstock/interception/v1/intercept_service_pb.js";
import { RolloutGateService } from "../gen/penstock/interception/v1/rollout_gate_service_pb.js";
import { OperationsService } from "../gen/penstock/ops/v1/operations_service_pb.js";
import { route } from "../gen/penstock/options/v1/options_pb.js";
import { FileService } from "../gen/penstock/sandbox/v1/file_service_pb.js";
import { ProcessService } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import { SandboxService } from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";
import { ToolboxService } from "../gen/penstock/sandbox/v1/toolbox_service_pb.js";
import { Service } from "../rpc.js";

const SERVICES = [
  AgentService,
  RolloutService,
  TerminalService,
  InferenceService,
  InterceptService,
  RolloutGateService,
  OperationsService,
  FileService,
  ProcessService,
  SandboxService,
  ToolboxService,
];

/** Serves every method and answers nothing; keeps the headers of each request. */
const sent: IncomingHttpHeaders[] = [];
const server = createServer();
let service: Service;

before(async () => {
  server.on("stream", (stream, headers) => {
    sent.push(headers);
    stream.on("error", () => {});
    stream.respond({ ":status": 200, "content-type": "application/grpc+proto", "grpc-status": "12" }, { endStream: true });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  service = new Service("driver", resolve({ addresses: { driver: `127.0.0.1:${port}` } }));
});

after(() => {
  service.close();
  server.close();
});

type AnyClient = Record<string, (request: unknown) => Promise<unknown> | AsyncIterable<unknown>>;

async function send(method: DescMethod, message: Message): Promise<IncomingHttpHeaders> {
  const client = service.client(method.parent) as unknown as AnyClient;
  async function* one() {
    yield message;
  }
  const isStream = method.methodKind === "client_streaming" || method.methodKind === "bidi_streaming";
  const begun = client[method.localName]?.(isStream ? one() : message);
  await assert.rejects(async () => {
    if (begun !== undefined && Symbol.asyncIterator in begun) {
      await Array.fromAsync(begun);
    } else {
      await begun;
    }
  });
  return sent.at(-1) ?? {};
}

function fill(message: ReflectMessage, [name, ...rest]: string[], value: string): void {
  const field = message.fields.find((one) => one.name === name);
  assert.ok(field !== undefined);
  let inner: ReflectMessage | undefined;
  if (rest.length > 0) {
    assert.ok(field.message !== undefined);
    inner = reflect(field.message);
    fill(inner, rest, value);
  }
  if (field.fieldKind === "list") {
    message.get(field).add(inner ?? value);
  } else {
    message.set(field, inner ?? value);
  }
}

it("are sent with every RPC, as the protos declare them", async () => {
  let routes = 0;
  for (const method of SERVICES.flatMap((one) => one.methods as DescMethod[])) {
    for (const { header, field } of getOption(method, route)) {
      routes++;
      const request = reflect(method.input);
      fill(request, field.split("."), "id-1");
      const headers = await send(method, request.message);
      assert.equal(headers[header], "id-1", `${method.name} ${header}`);
    }
  }
  assert.ok(routes > 70, `${routes}`);
});

it("lack an id that fits none", async () => {
  for (const odd of ["Größe", "a\nb", "\0", "x".repeat(256), "a\tb", "\x7f"]) {
    const request = create(RolloutService.method.getRollout.input, { rolloutId: odd });
    const headers = await send(RolloutService.method.getRollout, request);
    assert.equal(headers["x-penstock-rollout-id"], undefined);
  }
});
