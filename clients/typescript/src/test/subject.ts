/**
 * This client's subject in the conformance suite of clients (tests/conformance/clients/README.md): carries out the commands that come
 * on standard input, each as it comes, and says what came of it.
 */

import { stdin, stdout } from "node:process";
import { createInterface } from "node:readline";
import { unlessAborted } from "../calls.js";
import {
  Assays,
  Completion,
  connect,
  EnginesFailed,
  type GroupHandle,
  type InterceptSession,
  type ModelCall,
  type Penstock,
  PenstockError,
  type RolloutHandle,
  type RolloutModel,
  type RolloutOptions,
  type RolloutResult,
  type Task,
  type Verifier,
} from "../index.js";
import { forget, type Kept, SURFACE } from "./surface.js";

// What comes is JSON, as the suite defines it.
type Given = any;

const clients = new Map<string, Penstock>();
const rollouts = new Map<string, RolloutHandle>();
const groups = new Map<string, GroupHandle>();
const sessions = new Map<string, InterceptSession>();
const iterators = new Map<string, AsyncIterator<ModelCall, undefined>>();
const calls = new Map<string, ModelCall>();
const running = new Map<number, AbortController>();

const ABORTED = new Error("aborted by the suite");

function hex(bytes: ArrayBufferView): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("hex");
}

function unhex(text: string): ArrayBuffer {
  return Uint8Array.from(Buffer.from(text, "hex")).buffer;
}

function named<T>(kept: Map<string, T>, name: string): T {
  const found = kept.get(name);
  if (found === undefined) {
    throw new TypeError(`there is no ${name}`);
  }
  return found;
}

function observedError(error: unknown): object {
  if (error === ABORTED) {
    return { kind: "aborted" };
  }
  if (error instanceof DOMException && error.name === "TimeoutError") {
    return { kind: "timeout" };
  }
  if (!(error instanceof PenstockError)) {
    throw error;
  }
  return {
    kind: error.name
      .replace(/Error$/, "")
      .replace(/(?<=.)(?=[A-Z])/g, "_")
      .toLowerCase(),
    reason: error.reason,
    message: error.message,
    metadata: error.metadata,
    violations: error.violations,
    retry_after_s: error.retryAfterMs === undefined ? null : error.retryAfterMs / 1000,
    ...(error instanceof EnginesFailed && {
      failures: Object.fromEntries(Object.entries(error.failures).map(([name, { reason }]) => [name, reason])),
      in_force: error.inForce,
    }),
  };
}

function observedResult({ rollout, outcome, trajectory }: RolloutResult): object {
  const { failure, reward } = outcome;
  return {
    rollout_id: rollout.rolloutId,
    index: rollout.index,
    reward: reward?.value ?? null,
    failure: failure ? { cause: failure.cause, reason: failure.reason, retriable: failure.retriable } : null,
    grade: trajectory?.grade ?? null,
    samples: (trajectory?.samples ?? []).map((sample) => ({
      input_ids: hex(sample.inputIds),
      loss_mask: hex(sample.lossMask),
      logprobs: sample.logprobs ? hex(sample.logprobs) : null,
      versions: sample.versions.map((item) => [item.policyVersion, item.start, item.end]),
      turns: sample.turns.map((item) => [item.callId, item.start, item.end, item.untrainedReason]),
      prompt_count: sample.promptCount,
      weight: sample.weight,
      branch_class: sample.branchClass,
      truncated: sample.truncated,
      top: sample.top
        ? { count: sample.top.count, token_ids: hex(sample.top.tokenIds), logprobs: hex(sample.top.logprobs) }
        : null,
      turn_rewards: sample.turns.map((turn) => turn.reward ?? null),
      token_rewards: sample.tokenRewards ? hex(sample.tokenRewards) : null,
      policy_id: sample.policyId,
      turn_policies: sample.turns.map((turn) => turn.policyId),
    })),
    annotations: (trajectory?.annotations ?? []).map(({ name, author, callId, value, tokenValues, details }) => ({
      name,
      author,
      call_id: callId ?? null,
      value: value ?? null,
      token_values: tokenValues ? hex(Float32Array.from(tokenValues)) : null,
      details: details ?? {},
    })),
  };
}

function observedCall(call: ModelCall): object {
  return {
    call_id: call.callId,
    rollout_id: call.rolloutId,
    index: call.index,
    prompt: hex(call.promptTokenIds),
    prompt_count: call.promptCount,
    max_tokens: call.sampling?.maxTokens ?? null,
    lease_attempt: call.leaseAttempt,
    policy_id: call.policyId,
    min_policy_version: call.minPolicyVersion ?? null,
    messages: call.messages.map((message) => ({
      role: ["", "system", "developer", "user", "assistant", "tool"][message.role],
      text: message.parts.map(({ part }) => (part.case === "text" ? part.value.text : "")).join(""),
    })),
  };
}

function taskOf(spec: Given): Task {
  return {
    taskId: spec.task_id,
    instruction: spec.instruction,
    files: spec.files ?? {},
    setup: spec.setup ?? [],
    ...(spec.verify && {
      verifier: { commands: spec.verify, reward: spec.reward, ...(spec.fresh_fork && { freshFork: true }) },
    }),
  };
}

function optionsOf(spec: Given, signal: AbortSignal, assay?: string): RolloutOptions & { signal: AbortSignal } {
  return {
    signal,
    ...(assay && { requireAssay: Assays.load(assay) }),
    ...(spec.run_id && { runId: spec.run_id }),
    ...(spec.labels && { labels: spec.labels }),
    ...(spec.options && { options: spec.options }),
    ...(spec.mode && { mode: spec.mode }),
    ...(spec.max_calls && { budgets: { maxCalls: spec.max_calls } }),
    ...(spec.agent_timeout_s && { limits: { agentMs: spec.agent_timeout_s * 1000 } }),
    ...(spec.min_policy_version && { policy: { minVersion: spec.min_policy_version } }),
    ...(spec.max_staleness && { policy: { maxStaleness: spec.max_staleness } }),
    ...(spec.models && { models: spec.models.map(modelOf) }),
  };
}

function modelOf({ policy_id, from_index, until_index }: Given): RolloutModel {
  const isLast = from_index === undefined;
  const calls = { ...(until_index !== undefined && { untilIndex: until_index }), fromIndex: from_index };
  return { policyId: policy_id, ...(!isLast && { calls }) };
}

async function rolloutOf(given: Given, signal: AbortSignal): Promise<RolloutHandle> {
  const known = rollouts.get(given.rollout_id);
  return known ?? (await named(clients, given.client).rollouts.attach(given.rollout_id, { signal }));
}

async function groupOf(given: Given, signal: AbortSignal): Promise<GroupHandle> {
  return groups.get(given.group_id) ?? (await named(clients, given.client).groups.attach(given.group_id, { signal }));
}

async function handleOf(given: Given, signal: AbortSignal): Promise<RolloutHandle | GroupHandle> {
  return given.group_id ? groupOf(given, signal) : rolloutOf(given, signal);
}

/** Ends all that a case left open. */
async function reset(own?: AbortController): Promise<void> {
  for (const controller of running.values()) {
    if (controller !== own) {
      controller.abort(ABORTED);
    }
  }
  await Promise.all([...iterators.values()].map((iterator) => iterator.return?.()));
  await Promise.all([...clients.values()].map((client) => client.close()));
  for (const kept of [clients, rollouts, groups, sessions, iterators, calls]) {
    kept.clear();
  }
  forget();
}

const KEPT: Kept = { sessions, calls, taskOf, observedCall };

type Command = (given: Given, signal: AbortSignal) => Promise<object | undefined | void>;

const COMMANDS: Readonly<Record<string, Command>> = {
  connect: async ({ client, addresses, connection_file, namespace, token, tls, discover }) => {
    const where = connection_file ? { connectionFile: connection_file } : { addresses };
    const who = { ...(namespace && { namespace }), ...(token && { token }), ...(discover === false && { discover }) };
    clients.set(client, connect({ ...where, ...who, ...(tls && { tls: { caFile: tls.ca } }) }));
  },
  close: async ({ client }) => {
    await named(clients, client).close();
    clients.delete(client);
  },
  create_rollout: async ({ client, spec, rollout_id = "", assay }, signal) => {
    const options = { ...optionsOf(spec, signal, assay), rolloutId: rollout_id };
    const handle = await named(clients, client).rollouts.create(taskOf(spec), spec.agent, options);
    rollouts.set(handle.rolloutId, handle);
    return { rollout_id: handle.rolloutId };
  },
  create_group: async ({ client, spec, n, assay }, signal) => {
    const options = optionsOf(spec, signal, assay);
    const handle = await named(clients, client).groups.create(taskOf(spec), spec.agent, n, options);
    groups.set(handle.groupId, handle);
    return { group_id: handle.groupId, rollout_ids: handle.rolloutIds };
  },
  get_rollout: async ({ client, rollout_id }, signal) => {
    const { rolloutId, phase, labels } = await named(clients, client).rollouts.get(rollout_id, { signal });
    return { rollout_id: rolloutId, phase, labels };
  },
  list_rollouts: async ({ client, run_id }, signal) => {
    const listed = await Array.fromAsync(named(clients, client).rollouts.list({ runId: run_id, signal }));
    return { rollout_ids: listed.map((item) => item.rolloutId) };
  },
  events: async (given, signal) => {
    const handle = await rolloutOf(given, signal);
    const events = await Array.fromAsync(handle.events({ after: given.after ?? 0, signal }));
    return { sequences: events.map((event) => event.sequence) };
  },
  result: async (given, signal) => {
    const handle = await rolloutOf(given, signal);
    const ended = await handle.result({ signal });
    return observedResult({ ...ended, trajectory: await handle.trajectory({ samplesOnly: true, top: given.top ?? false, signal }) });
  },
  results: async (given, signal) => {
    const results = await (await groupOf(given, signal)).results({ signal });
    return { results: results.map(observedResult) };
  },
  trajectory: async (given, signal) => {
    const { with_tensors: tensors = false, with_images: images = false } = given;
    const { message } = await (await rolloutOf(given, signal)).trajectory({ tensors, images, signal });
    const held = message.calls.map(({ completion }) => completion?.tensors ?? []);
    const all = [...held.flat(), ...message.samples.flatMap((sample) => sample.tensors)];
    return {
      tensors: all.map(({ data }) => hex(data)),
      images: message.calls.flatMap(({ media }) => media).map(({ data }) => hex(data)),
    };
  },
  image: async (given, signal) => {
    const handle = await rolloutOf(given, signal);
    return { data: hex(await handle.image(Buffer.from(given.sha256, "hex"), { signal })) };
  },
  regrade: async (given, signal) => {
    const { verify, name } = given;
    const verifier: Verifier | undefined = verify && { commands: verify };
    const grade = await (await rolloutOf(given, signal)).regrade(verifier, { ...(name && { name }), signal });
    return { name: grade.name, reward: grade.reward?.value ?? null, failure: grade.failure?.reason ?? null };
  },
  cancel: async (given, signal) => (await handleOf(given, signal)).cancel(given.reason ?? "", { signal }),
  delete: async (given, signal) => (await handleOf(given, signal)).delete({ signal }),
  branch: async (given, signal) => {
    const { call, n, answer, seed, train_prefix, replay } = given;
    const group = await (await rolloutOf(given, signal)).branch(call, n, {
      signal,
      ...(answer !== undefined && { answer }),
      ...(seed !== undefined && { seed }),
      ...(train_prefix !== undefined && { trainPrefix: train_prefix }),
      ...(replay !== undefined && { replay }),
    });
    groups.set(group.groupId, group);
    return { group_id: group.groupId, rollout_ids: group.rolloutIds };
  },
  annotate: async (given, signal) => {
    const annotations = given.annotations.map(({ call_id, token_values, ...rest }: Given) => ({
      ...rest,
      callId: call_id,
      tokenValues: token_values === undefined ? undefined : new Float32Array(unhex(token_values)),
    }));
    await (await rolloutOf(given, signal)).annotate(annotations, { signal });
  },
  pause_rollouts: async (given, signal) => {
    const limit = given.max_duration_s === undefined ? {} : { maxDurationMs: given.max_duration_s * 1000 };
    const frozen = await (await handleOf(given, signal)).pause("conformance", { signal, ...limit });
    return given.group_id ? {} : { frozen };
  },
  resume_rollouts: async (given, signal) => (await handleOf(given, signal)).resume({ signal }),
  serve: async (given, signal) => {
    iterators.set(given.session, (await handleOf(given, signal)).calls({ credits: given.credits }));
  },
  intercept: async ({ client, session, run_id, credits, policy_version, policy_ids, policies, messages }, signal) => {
    const opened = await named(clients, client).intercept({
      runId: run_id,
      credits,
      signal,
      onToolError: () => {}, // what breaks in a case's tool is no complaint
      ...(policy_version !== undefined && { policyVersion: policy_version }),
      ...(policy_ids !== undefined && { policyIds: policy_ids }),
      ...(policies !== undefined && { policies }),
      ...(messages !== undefined && { messages }),
    });
    sessions.set(session, opened);
    iterators.set(session, opened.calls());
    return { session_id: opened.sessionId };
  },
  next_call: async ({ session }) => {
    const step = await named(iterators, session).next();
    if (step.done) {
      return { end: true };
    }
    const call = step.value;
    calls.set(call.callId, call);
    return observedCall(call);
  },
  deliver: async ({ call_id, token_ids, logprobs, policy_version, finish_reason, top }, signal) => {
    const ids = new Int32Array(unhex(token_ids));
    const completion = Completion.ofTokens(ids, new Float32Array(unhex(logprobs)), {
      ...(policy_version !== undefined && { policyVersion: policy_version }),
      finishReason: finish_reason ?? "stop",
      ...(top !== undefined && {
        top: {
          count: top.count,
          tokenIds: new Int32Array(unhex(top.token_ids)),
          logprobs: new Float32Array(unhex(top.logprobs)),
        },
      }),
    });
    await named(calls, call_id).deliver(completion, { signal });
  },
  deliver_text: async ({ call_id, text }, signal) => named(calls, call_id).deliver(Completion.ofText(text), { signal }),
  deliver_unsendable: async ({ call_id }, signal) => {
    const completion = Completion.ofTokens([1], [-1], { samplingUsed: { maxTokens: 1.5 } });
    await named(calls, call_id).deliver(completion, { signal });
  },
  fail: async ({ call_id, reason, message, retriable }, signal) =>
    named(calls, call_id).fail(reason, { message, retriable, signal }),
  delegate: async ({ call_id }, signal) => named(calls, call_id).delegate({ signal }),
  release: async ({ call_id }, signal) => named(calls, call_id).release({ signal }),
  call_ended: async ({ call_id }) => {
    const call = named(calls, call_id);
    if (!call.ended) {
      await new Promise((resolve) => call.signal.addEventListener("abort", resolve));
    }
    return { reason: call.endReason };
  },
  announce: async ({ session, policy_version, policy_id }) => named(sessions, session).announce(policy_version, policy_id),
  set_credits: async ({ session, calls: credits }) => named(sessions, session).setCredits(credits),
  pause: async ({ session }, signal) => ({
    open_calls: await unlessAborted(named(sessions, session).pause("conformance"), signal),
  }),
  resume: async ({ session }, signal) => unlessAborted(named(sessions, session).resume(), signal),
  finish: async ({ session }) => named(sessions, session).finish(),
  close_session: async ({ session }) => named(sessions, session).close(),
  abort: async ({ target }) => running.get(target)?.abort(ABORTED),
  reset: async ({ id }) => reset(running.get(id)),
};

async function answer(given: Given): Promise<void> {
  const controller = new AbortController();
  running.set(given.id, controller);
  const { signal } = controller;
  const either = given.timeout_s ? AbortSignal.any([signal, AbortSignal.timeout(given.timeout_s * 1000)]) : signal;
  let said: object;
  try {
    const other = SURFACE[given.do];
    const done =
      other === undefined
        ? await COMMANDS[given.do]?.(given, either)
        : await other(named(clients, given.client), given, either, KEPT);
    said = { ok: done ?? {} };
  } catch (error) {
    said = { error: observedError(error) };
  }
  running.delete(given.id);
  stdout.write(`${JSON.stringify({ id: given.id, ...said })}\n`);
}

for await (const line of createInterface({ input: stdin })) {
  void answer(JSON.parse(line));
}
await reset();
