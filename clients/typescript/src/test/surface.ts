/** The rest of this client's subject: sandboxes, terminals, agents, weights, host tools, calls without a session. */

import { clone } from "@bufbuild/protobuf";
import { present } from "../driver.js";
import { AgentSpecSchema } from "../gen/penstock/driver/v1/agent_pb.js";
import {
  type HostTool,
  type InterceptSession,
  type ModelCall,
  type Penstock,
  type ProcessHandle,
  type SandboxHandle,
  type Score,
  type Task,
  type Tensors,
  type TerminalHandle,
  ToolFailed,
  type ToScore,
} from "../index.js";
import { type Exit, ExitReasonSchema, OutputStream } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import { FileKindSchema } from "../gen/penstock/sandbox/v1/file_service_pb.js";
import { word } from "../wire.js";

// What comes is JSON, as the suite defines it.
type Given = any;

/** What the case that runs has of the gate's, in subject.ts. */
export interface Kept {
  readonly sessions: ReadonlyMap<string, InterceptSession>;
  readonly calls: Map<string, ModelCall>;
  taskOf(spec: Given): Task;
  observedCall(call: ModelCall): object;
}

const sandboxes = new Map<string, SandboxHandle>();
const processes = new Map<string, ProcessHandle>();
const terminals = new Map<string, TerminalHandle>();
const tools = new Map<string, Tool>();

/** Forgets what a case had. */
export function forget(): void {
  for (const kept of [sandboxes, processes, terminals, tools]) {
    kept.clear();
  }
}

function known<T>(kept: Map<string, T>, name: string): T {
  const found = kept.get(name);
  if (found === undefined) {
    throw new TypeError(`there is no ${name}`);
  }
  return found;
}

function exitOf(exit: Exit | undefined): object {
  const { status } = exit ?? {};
  const code = status?.case === "code" ? status.value : null;
  return { reason: word(ExitReasonSchema, exit?.reason ?? 0), code };
}

function hex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString("hex");
}

function text(bytes: Uint8Array | undefined): string {
  return new TextDecoder().decode(bytes);
}

function tensorsOf(given: Given): Tensors {
  const entries = Object.entries(given as Record<string, { shape: number[]; fill: number }>);
  return Object.fromEntries(
    entries.map(([name, { shape, fill }]) => {
      const count = shape.reduce((product, length) => product * length, 1);
      return [name, { shape, data: new Float32Array(count).fill(fill) }];
    }),
  );
}

function toScore({ token_ids, start, top_logprobs, temperature, exact_version }: Given): ToScore {
  return {
    tokenIds: token_ids,
    start,
    ...(top_logprobs && { topLogprobs: top_logprobs }),
    ...(temperature && { temperature }),
    ...(exact_version && { exactVersion: exact_version }),
  };
}

function observedScore({ logprobs, top }: Score): object {
  return {
    logprobs: hex(new Uint8Array(logprobs.buffer, logprobs.byteOffset, logprobs.byteLength)),
    top_count: top?.count ?? null,
    top_token_ids: top === undefined ? null : [...top.tokenIds],
  };
}

/** What a tool does when it is called is in its `does`. */
class Tool {
  runs = 0;
  readonly called = Promise.withResolvers<void>();
  readonly let = Promise.withResolvers<void>();

  constructor(readonly does: string) {}

  async run(given: { readonly word?: unknown }): Promise<unknown> {
    this.runs += 1;
    this.called.resolve();
    switch (this.does) {
      case "text":
        return `the word is ${String(given.word)}`;
      case "fails":
        throw new ToolFailed("There is no such word.");
      case "breaks":
        throw new TypeError("a secret of the host");
      case "waits":
        await this.let.promise;
        break;
      default:
    }
    return { word: given.word ?? null, runs: this.runs };
  }
}

async function sandboxOf(ps: Penstock, id: string, signal: AbortSignal): Promise<SandboxHandle> {
  return sandboxes.get(id) ?? (await ps.sandboxes.attach(id, { signal }));
}

type Command = (ps: Penstock, given: Given, signal: AbortSignal, kept: Kept) => Promise<object | undefined | void>;
type OfSandbox = (sandbox: SandboxHandle, given: Given, signal: AbortSignal) => Promise<object | undefined | void>;

const OF_SANDBOX: Readonly<Record<string, OfSandbox>> = {
  sandbox_run: async (sandbox, { shell, stdin }, signal) => {
    const ran = await sandbox.run(shell, { ...(stdin && { stdin }), signal });
    return { ...exitOf(ran.exit), stdout: text(ran.stdout), stderr: text(ran.stderr) };
  },
  process_start: async (sandbox, { shell, stdin }, signal) => {
    const process = await sandbox.start(shell, { stdin: stdin ?? false, signal });
    processes.set(process.processId, process);
    return { process_id: process.processId };
  },
  process_write: async (_, { process_id, text: given, last }, signal) =>
    known(processes, process_id).write(given, { last: last ?? false, signal }),
  process_output: async (_, { process_id }, signal) => {
    const outputs = { [OutputStream.STDOUT]: "", [OutputStream.STDERR]: "", [OutputStream.UNSPECIFIED]: "" };
    let end = {};
    for await (const event of known(processes, process_id).output({ signal })) {
      if (event.case === "chunk") {
        outputs[event.value.stream] += text(event.value.data);
      } else if (event.case === "exit") {
        end = exitOf(event.value);
      }
    }
    return { ...end, stdout: outputs[OutputStream.STDOUT], stderr: outputs[OutputStream.STDERR] };
  },
  process_wait: async (_, { process_id }, signal) => exitOf(await known(processes, process_id).wait({ signal })),
  process_kill: async (_, { process_id }, signal) => exitOf(await known(processes, process_id).kill({ signal })),
  file_write: async (sandbox, { path, text: given, mode }, signal) =>
    sandbox.writeFile(path, given, { ...(mode !== undefined && { mode }), signal }),
  file_read: async (sandbox, { path }, signal) => ({ text: text(await sandbox.readFile(path, { signal })) }),
  file_list: async (sandbox, { path }, signal) => {
    const entries = await Array.fromAsync(sandbox.files(path, { signal }));
    return { names: entries.map(({ name }) => name) };
  },
  file_stat: async (sandbox, { path }, signal) => {
    const { kind, sizeBytes, mode } = await sandbox.stat(path, { signal });
    return { kind: word(FileKindSchema, kind), size: Number(sizeBytes), mode };
  },
  file_remove: async (sandbox, { path, recursive }, signal) =>
    sandbox.remove(path, { recursive: recursive ?? false, signal }),
  make_directory: async (sandbox, { path }, signal) => sandbox.makeDirectory(path, { signal }),
  tree_read: async (sandbox, { path }, signal) => ({ tar: hex(await sandbox.readTree(path, { signal })) }),
  tree_write: async (sandbox, { path, tar }, signal) => sandbox.writeTree(path, Buffer.from(tar, "hex"), { signal }),
  sandbox_renew: async (sandbox, { lease_s }, signal) => {
    await sandbox.renew(lease_s * 1000, { signal });
  },
  sandbox_pause: async (sandbox, _, signal) => sandbox.pause({ signal }),
  sandbox_resume: async (sandbox, _, signal) => sandbox.resume({ signal }),
  sandbox_diff: async (sandbox, _, signal) => {
    const { tar, deletedPaths } = await sandbox.diff({ signal });
    return { tar: hex(tar), deleted: deletedPaths };
  },
  sandbox_delete: async (sandbox, _, signal) => sandbox.delete({ signal }),
};

const OTHERS: Readonly<Record<string, Command>> = {
  sandbox_create: async (ps, { labels, lease_s }, signal) => {
    const spec = { ...(labels && { labels }), ...(lease_s && { leaseMs: lease_s * 1000 }) };
    const sandbox = await ps.sandboxes.create(spec, { signal });
    sandboxes.set(sandbox.sandboxId, sandbox);
    return { sandbox_id: sandbox.sandboxId };
  },
  sandbox_attach: async (ps, { sandbox_id }, signal) => {
    const found = await ps.sandboxes.attach(sandbox_id, { signal });
    sandboxes.set(found.sandboxId, found);
    return { sandbox_id: found.sandboxId };
  },
  sandbox_list: async (ps, { labels }, signal) => {
    const listed = await Array.fromAsync(ps.sandboxes.list({ labels, signal }));
    return { sandbox_ids: listed.map(({ sandboxId }) => sandboxId) };
  },
  sandbox_prepare: async (ps, { files, setup }, signal) => ({
    snapshot_id: (await ps.sandboxes.prepare({}, { files, setup, signal })).snapshotId,
  }),
  snapshot_list: async (ps, _, signal) => {
    const listed = await Array.fromAsync(ps.sandboxes.snapshots({ signal }));
    return { snapshot_ids: listed.map(({ snapshotId }) => snapshotId) };
  },
  snapshot_delete: async (ps, { snapshot_id }, signal) => ps.sandboxes.deleteSnapshot(snapshot_id, { signal }),
  sandbox_fork: async (ps, { snapshot_id, sandbox_id, count }, signal) => {
    const children = snapshot_id
      ? ps.sandboxes.fork(snapshot_id, count, { signal })
      : (await sandboxOf(ps, sandbox_id, signal)).fork(count, { signal });
    const ids: string[] = [];
    for await (const { index, sandbox, failure } of children) {
      if (failure !== undefined) {
        throw failure;
      }
      ids[index] = sandbox.sandboxId;
      sandboxes.set(sandbox.sandboxId, sandbox);
    }
    return { sandbox_ids: ids };
  },
  terminal_open: async (ps, { spec }, signal, { taskOf }) => {
    const terminal = await ps.terminals.open(taskOf(spec), { signal });
    terminals.set(terminal.terminalId, terminal);
    return { terminal_id: terminal.terminalId };
  },
  terminal_run: async (_, { terminal_id, shell }, signal) => {
    const { result, ended } = await known(terminals, terminal_id).run(shell, { signal });
    return { ...exitOf(result?.exit), stdout: text(result?.stdout), ended };
  },
  terminal_answer: async (_, { terminal_id, text: given }, signal) => {
    const { ended, reward } = await known(terminals, terminal_id).answer(given, { signal });
    return { ended, reward: reward?.value ?? null };
  },
  terminal_get: async (ps, { terminal_id }, signal) => {
    const found = await ps.terminals.attach(terminal_id, { signal });
    terminals.set(found.terminalId, found);
    const { stepCount, ended } = found.info;
    return { step_count: stepCount, ended };
  },
  terminal_close: async (_, { terminal_id }, signal) => known(terminals, terminal_id).close({ signal }),
  agent_list: async (ps, _, signal) => {
    const agents = await Array.fromAsync(ps.agents.list({ signal }));
    return { names: agents.map(({ spec }) => spec?.name) };
  },
  agent_get: async (ps, { name }, signal) => {
    const { spec, builtIn } = await ps.agents.get(name, { signal });
    return { name: spec?.name, built_in: builtIn };
  },
  agent_register: async (ps, { like, name }, signal) => {
    const found = await ps.agents.get(like, { signal });
    const own = clone(AgentSpecSchema, present(found.spec));
    own.name = name;
    const { spec, builtIn } = await ps.agents.register(own, { signal });
    return { name: spec?.name, built_in: builtIn };
  },
  agent_delete: async (ps, { name }, signal) => ps.agents.delete(name, { signal }),
  agent_check: async (ps, { name, spec_only }, signal) => ({
    findings: await Array.fromAsync(ps.agents.check(name, { specOnly: spec_only, signal })),
  }),
  policy_version: async (ps, _, signal) => ({ policy_version: await ps.inference.policyVersion({ signal }) }),
  update_weights: async (ps, { after, tensors, partial }, signal) => {
    const options = { partial: partial ?? false, signal };
    const { policyVersion, away } = await ps.inference.updateWeights(after + 1, tensorsOf(tensors), options);
    return { policy_version: policyVersion, away };
  },
  update_weights_from: async (ps, { after, path }, signal) => {
    const { policyVersion } = await ps.inference.updateWeightsFrom(after + 1, path, { signal });
    return { policy_version: policyVersion };
  },
  init_transfer: async (ps, { backend, options }, signal) => ps.inference.initTransfer(backend, options, { signal }),
  transfer: async (ps, { after, descriptor, commit }, signal) => {
    const transfer = await ps.inference.startTransfer(after + 1, { signal });
    try {
      await transfer.tensors(descriptor, { signal });
      if (commit) {
        await transfer.commit({ signal });
      }
    } finally {
      await transfer.abandon({ signal });
    }
    return { policy_version: await ps.inference.policyVersion({ signal }) };
  },
  load_adapter: async (ps, { name, version, tensors, config }, signal) => {
    const loaded = await ps.inference.loadAdapter(name, version, tensorsOf(tensors), config, { signal });
    return { name: loaded.name, policy_version: Number(loaded.policyVersion), rank: loaded.rank };
  },
  load_adapter_from: async (ps, { name, version, path }, signal) => {
    const loaded = await ps.inference.loadAdapterFrom(name, version, path, { signal });
    return { name: loaded.name, policy_version: Number(loaded.policyVersion), rank: loaded.rank };
  },
  adapter_list: async (ps, _, signal) => {
    const adapters = await Array.fromAsync(ps.inference.adapters({ signal }));
    return { names: adapters.map(({ name }) => name) };
  },
  unload_adapter: async (ps, { name }, signal) => ps.inference.unloadAdapter(name, { signal }),
  pause_engine: async (ps, { mode }, signal) => ({ in_flight: await ps.inference.pause({ mode, signal }) }),
  resume_engine: async (ps, _, signal) => ps.inference.resume({ signal }),
  score: async (ps, { sequences }, signal) => {
    const { tokenIds, start = 1, topLogprobs = 0, ...options } = toScore(sequences[0]);
    return observedScore(await ps.inference.scoreTop(tokenIds, start, topLogprobs, { ...options, signal }));
  },
  score_batch: async (ps, { sequences }, signal) => {
    const scores = await ps.inference.scoreBatch(sequences.map(toScore), { signal });
    return { scores: scores.map(observedScore) };
  },
  score_each: async (ps, { sequences }, signal) => {
    const found: object[] = [];
    for await (const { index, score, failure } of ps.inference.scoreEach(sequences.map(toScore), { signal })) {
      found[index] = score === undefined ? { failure: failure.reason } : observedScore(score);
    }
    return { scores: found };
  },
  offer_tools: async (_, { session, tools: given }, signal, { sessions }) => {
    const offered = given.map(({ name, does, parameters }: Given): HostTool => {
      const tool = new Tool(does);
      tools.set(name, tool);
      return { name, ...(parameters && { parameters }), run: (call) => tool.run(call.arguments) };
    });
    await sessions.get(session)?.offerTools(offered, { signal });
  },
  tool_called: async (_, { name }) => {
    const tool = known(tools, name);
    await tool.called.promise;
    return { runs: tool.runs };
  },
  let_tool: async (_, { name }) => known(tools, name).let.resolve(),
  log_metrics: async (ps, { run_id, step, values, session }, signal, { sessions }) => {
    const logs = run_id === undefined ? sessions.get(session) : undefined;
    await (logs?.log(values, step, { signal }) ?? ps.runs.log(run_id, values, step, { signal }));
  },
  metrics: async (ps, { run_id, names, max_points }, signal) => {
    const options = { ...(names && { names }), ...(max_points && { maxPoints: max_points }), signal };
    const found = await ps.runs.metrics(run_id, options);
    const pairs = found.map(({ name, points }) => [name, points.map(({ step, value }) => [step, value])]);
    return { metrics: Object.fromEntries(pairs) };
  },
  delete_metrics: async (ps, { run_id, names, from_step }, signal) => {
    const options = { ...(names && { names }), ...(from_step && { fromStep: from_step }), signal };
    return { count: await ps.runs.deleteMetrics(run_id, options) };
  },
  lease_calls: async (ps, { run_id, policy_ids, max_calls, wait_s }, signal, { calls, observedCall }) => {
    const options = {
      ...(policy_ids && { policyIds: policy_ids }),
      ...(max_calls && { maxCalls: max_calls }),
      ...(wait_s && { waitMs: wait_s * 1000 }),
    };
    const leased = await ps.leaseCalls({ runId: run_id, signal, ...options });
    for (const call of leased) {
      calls.set(call.callId, call);
    }
    return { calls: leased.map(observedCall) };
  },
  extend_leases: async (ps, { call_ids }, signal, { calls }) => {
    const lost = await ps.extendLeases(
      call_ids.map((id: string) => known(calls, id)),
      { signal },
    );
    return { lost: lost.map(({ callId }) => callId) };
  },
  watch_rollouts: async (ps, { run_id, until_away }, signal) => {
    const ids: string[] = [];
    for await (const { rollouts, complete, away } of ps.rollouts.watch({ runId: run_id, signal })) {
      ids.push(...rollouts.map(({ rolloutId }) => rolloutId));
      if (until_away ? away.length > 0 : complete) {
        return { rollout_ids: ids.sort(), away };
      }
    }
    return { rollout_ids: ids.sort() };
  },
  export: async (ps, { run_id }, signal) => {
    const exported = await Array.fromAsync(ps.rollouts.export({ runId: run_id, signal }));
    const rollouts = exported.map(({ trajectory, outcome }) => ({
      rollout_id: trajectory.message.rolloutId,
      samples: trajectory.samples.length,
      reward: outcome.reward?.value ?? null,
    }));
    return { rollouts: rollouts.sort((one, other) => (one.rollout_id < other.rollout_id ? -1 : 1)) };
  },
  server_info: async (ps, { service }, signal) => {
    const server = await ps.serverInfo(service, { signal });
    const { contractRevision: revision, maxMessageBytes } = server;
    return { service: server.service, revision, max_message_bytes: Number(maxMessageBytes) };
  },
};

/** By the name of what is to be done; those of a sandbox find it first. */
export const SURFACE: Readonly<Record<string, Command>> = {
  ...OTHERS,
  ...Object.fromEntries(
    Object.entries(OF_SANDBOX).map(([name, command]): [string, Command] => [
      name,
      async (ps, given, signal) => command(await sandboxOf(ps, given.sandbox_id, signal), given, signal),
    ]),
  ),
};
