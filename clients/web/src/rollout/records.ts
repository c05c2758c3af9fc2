/** Reads what the services keep of a rollout: its trajectory, the messages of a call, the vocabulary of its tokens. */

import { InferenceService } from "@gen/penstock/inference/v1/inference_service_pb";
import { InterceptService } from "@gen/penstock/interception/v1/intercept_service_pb";
import { RolloutGateService } from "@gen/penstock/interception/v1/rollout_gate_service_pb";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import {
  type Annotation,
  type Branch,
  type Call,
  CaptureLevel,
  type Finding,
  Grade,
  type HostToolCall,
  type Sample,
  type Trajectory,
} from "@gen/penstock/trajectory/v1/trajectory_pb";
import { driverOf, gateOf } from "../lib/members";
import { client } from "../lib/transport";
import { messagesOf, newMessages, type Said } from "./bodies";
import { decoded } from "./safe";
import { Vocabulary } from "./vocabulary";

/** A trajectory as far as this page shows it, put together from its fragments. */
export interface Capture {
  readonly calls: readonly Call[];
  readonly branches: readonly Branch[];
  readonly samples: readonly Sample[];
  readonly findings: readonly Finding[];
  readonly hostToolCalls: readonly HostToolCall[];
  readonly annotations: readonly Annotation[];
  readonly grade: Grade;
  readonly captureLevel: CaptureLevel;
  readonly tokenizerSha256: Uint8Array;
  /** The rollout has ended: nothing more will come. */
  readonly isWhole: boolean;
}

export const NO_CAPTURE: Capture = {
  calls: [],
  branches: [],
  samples: [],
  findings: [],
  hostToolCalls: [],
  annotations: [],
  grade: Grade.UNSPECIFIED,
  captureLevel: CaptureLevel.UNSPECIFIED,
  tokenizerSha256: new Uint8Array(),
  isWhole: false,
};

/** Puts fragments together behind the calls and host tool calls of `known`; what comes again replaces what was known of it. */
async function merged(
  fragments: AsyncIterable<{ trajectory?: Trajectory | undefined }>,
  known: Pick<Capture, "calls" | "hostToolCalls">,
  isWhole: boolean,
): Promise<Capture> {
  const calls = new Map(known.calls.map((call) => [call.callId, call]));
  const hostToolCalls = new Map(known.hostToolCalls.map((call) => [call.toolCallId, call]));
  const branches: Branch[] = [];
  const samples: Sample[] = [];
  const findings: Finding[] = [];
  const annotations: Annotation[] = [];
  let grade: Grade = Grade.UNSPECIFIED;
  let captureLevel: CaptureLevel = CaptureLevel.UNSPECIFIED;
  let tokenizerSha256: Uint8Array = new Uint8Array();
  for await (const { trajectory } of fragments) {
    if (!trajectory) continue;
    for (const call of trajectory.calls) calls.set(call.callId, call);
    branches.push(...trajectory.branches);
    samples.push(...trajectory.samples);
    findings.push(...trajectory.findings);
    annotations.push(...trajectory.annotations);
    for (const call of trajectory.hostToolCalls) hostToolCalls.set(call.toolCallId, call);
    if (trajectory.grade !== Grade.UNSPECIFIED) grade = trajectory.grade;
    if (trajectory.captureLevel !== CaptureLevel.UNSPECIFIED) captureLevel = trajectory.captureLevel;
    if (trajectory.tokenizerSha256.length > 0) tokenizerSha256 = trajectory.tokenizerSha256;
  }
  return { calls: inOrder(calls), branches, samples, findings, hostToolCalls: inOrder(hostToolCalls), annotations, grade, captureLevel, tokenizerSha256, isWhole };
}

function inOrder<T extends { readonly index: number }>(calls: ReadonlyMap<string, T>): T[] {
  return [...calls.values()].sort((a, b) => a.index - b.index);
}

/** Those that have ended, up to the first that has not: nothing about them changes any more. */
function settled<T extends Call | HostToolCall>(calls: readonly T[]): T[] {
  const open = calls.findIndex((call) => call.endTime === undefined);
  return open < 0 ? [...calls] : calls.slice(0, open);
}

/** The trajectory of a rollout that has ended. */
export function trajectory(rolloutId: string, signal: AbortSignal): Promise<Capture> {
  const fragments = client(RolloutService, driverOf(rolloutId)).getTrajectory({ rolloutId }, { signal, timeoutMs: 0 });
  return merged(fragments, NO_CAPTURE, true);
}

/** What the gate has of a rollout that runs; of `known` only what may have changed since is asked for again. */
export function captureSoFar(rolloutId: string, known: Capture, signal: AbortSignal): Promise<Capture> {
  const calls = settled(known.calls);
  const hostToolCalls = settled(known.hostToolCalls);
  const last = calls.at(-1)?.index;
  const request = {
    rolloutId,
    ...(last === undefined ? {} : { afterIndex: last }), // samples come only without it
    afterToolCallIndex: hostToolCalls.at(-1)?.index ?? -1,
  };
  const fragments = client(RolloutGateService, gateOf(rolloutId)).getCapture(request, { signal, timeoutMs: 0 });
  return merged(fragments, { calls, hostToolCalls }, false);
}

/** What the agent newly said in a call. */
export async function saidInCall(call: Call, signal: AbortSignal): Promise<Said[]> {
  const answer = await client(InterceptService, gateOf(call.rolloutId)).getCall({ callId: call.callId, includeBody: true }, { signal });
  return newMessages(messagesOf(answer.call?.requestBody ?? new Uint8Array(), call.dialect));
}

/** Why token texts cannot be shown; the message is for people. */
export class NoVocabulary extends Error {
  override readonly name = "NoVocabulary";
}

const vocabularies = new Map<string, Promise<Vocabulary>>();

/** The vocabulary with a digest, read once for all pages. @throws NoVocabulary, ConnectError, VocabularyError. */
export function vocabulary(sha256: Uint8Array): Promise<Vocabulary> {
  const key = Array.from(sha256, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const known = vocabularies.get(key);
  if (known) return known;
  const asked = readVocabulary(key);
  vocabularies.set(key, asked);
  asked.catch(() => vocabularies.delete(key)); // asked again by the next page
  return asked;
}

async function readVocabulary(key: string): Promise<Vocabulary> {
  const service = client(InferenceService);
  const info = await service.getInfo({});
  const serves = Array.from(info.tokenizerSha256, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (serves !== key) {
    throw new NoVocabulary("These tokens belong to another tokenizer than that of the inference service that runs now: they are shown by their ids.");
  }
  const chunks: Uint8Array[] = [];
  for await (const part of service.getTokenizer({}, { timeoutMs: 0 })) {
    if (part.fileName === "tokenizer.json") chunks.push(part.chunk);
  }
  return Vocabulary.parse(decoded(joined(chunks)));
}

function joined(chunks: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
  let at = 0;
  for (const chunk of chunks) {
    whole.set(chunk, at);
    at += chunk.length;
  }
  return whole;
}
