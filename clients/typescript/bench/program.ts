/**
 * Takes calls and answers them, by the client or by the generated code alone; benchmarks/clients says what is told.
 *
 *   node bench/program.ts client|stubs ADDRESS CALLS CREDITS
 */

import { argv, cpuUsage } from "node:process";
import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { Completion, connect, type ModelCall } from "@penstock/client";
import { InterceptService } from "@penstock/client/gen/penstock/interception/v1/intercept_service_pb.js";

const IDS = Int32Array.from({ length: 100 }, (_, index) => index);
const LOGPROBS = new Float32Array(100).fill(-0.5);
const PROCESSED = 2;
const STOP = 1;

const [kind, address = "", calls = 0, credits = 1] = [argv[2], argv[3], Number(argv[4]), Number(argv[5])];
const first = Math.floor(calls / 10);
const took: number[] = [];
let answered = 0;
let began = { wall: 0, cpu: cpuUsage() };

/** A call that came at `came` is acknowledged; whether it was the last. */
function acknowledged(came: number): boolean {
  answered += 1;
  if (answered === first) {
    began = { wall: performance.now(), cpu: cpuUsage() };
  } else if (answered > first) {
    took.push(performance.now() - came);
  }
  if (answered < calls) {
    return false;
  }
  const { user, system } = cpuUsage(began.cpu);
  const wall = performance.now() - began.wall;
  const p50 = took.toSorted((one, other) => one - other)[Math.floor(took.length / 2)] ?? 0;
  const told = { cpu_us: (user + system) / took.length, wall_us: (1e3 * wall) / took.length, p50_us: 1e3 * p50 };
  console.log(JSON.stringify(told));
  return true;
}

async function byClient(): Promise<void> {
  const ps = connect({ addresses: { interception: address } });
  const session = await ps.intercept({ credits });
  const answer = async (call: ModelCall): Promise<void> => {
    const came = performance.now();
    if (call.promptTokenIds.length !== 1000) throw new Error("another prompt");
    await call.deliver(Completion.ofTokens(IDS, LOGPROBS, { policyVersion: 1 }));
    if (acknowledged(came)) {
      session.finish();
    }
  };
  const loops = Array.from({ length: credits }, async () => {
    for await (const call of session.calls()) {
      await answer(call);
    }
  });
  await Promise.all(loops);
  await ps.close();
}

async function byStubs(): Promise<void> {
  const transport = createGrpcTransport({ baseUrl: `http://${address}`, acceptCompression: [] });
  const client = createClient(InterceptService, transport);
  const frames: object[] = [{ frame: { case: "hello", value: { credits: { calls: credits } } } }];
  let wake = () => {};
  async function* requests() {
    for (;;) {
      for (let frame = frames.shift(); frame !== undefined; frame = frames.shift()) {
        yield frame;
        if (answered === calls) return;
      }
      await new Promise<void>((resolve) => {
        wake = resolve;
      });
    }
  }
  const came = new Map<string, number>();
  for await (const { frame } of client.intercept(requests())) {
    if (frame.case === "acknowledged") {
      for (const callId of frame.value.acceptedCallIds) {
        if (acknowledged(came.get(callId) ?? 0)) {
          frames.push({ frame: { case: "goodbye", value: {} } });
        }
        came.delete(callId);
      }
    } else if (frame.case === "calls") {
      const now = performance.now();
      const results = frame.value.calls.map((call) => {
        came.set(call.callId, now);
        if (call.promptTokenIds.length !== 4000) throw new Error("another prompt");
        const span = {
          tokenIds: new Uint8Array(IDS.buffer),
          logprobs: new Uint8Array(LOGPROBS.buffer),
          count: 100,
          logprobsMode: PROCESSED,
          versions: [{ policyVersion: 1n, start: 0, end: 100 }],
        };
        const completion = { span, finishReason: STOP, engine: "trainer" };
        return { callId: call.callId, leaseId: call.leaseId, result: { case: "completion", value: completion } };
      });
      frames.push({ frame: { case: "results", value: { results } } });
    }
    wake();
  }
}

await (kind === "client" ? byClient() : byStubs());
