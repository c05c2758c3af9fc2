/** What a rollout is made of: task, verifier, agent, sandbox, limits. Times are in milliseconds. */

import { create, type JsonObject, type MessageInitShape } from "@bufbuild/protobuf";
import type { Assays } from "./assays.js";
import type { Sampling } from "./completions.js";
import { InvalidArgument } from "./errors.js";
import {
  type RolloutSpec,
  RolloutSpecSchema,
  type TaskSchema,
  type VerifierSchema,
} from "./gen/penstock/driver/v1/rollout_pb.js";
import {
  ControlTokens,
  type ModelSourceSchema,
  ModeSchema,
  type RolloutModelSchema,
} from "./gen/penstock/interception/v1/interception_pb.js";
import type { CommandSchema } from "./gen/penstock/sandbox/v1/process_service_pb.js";
import type { ResourcesSchema } from "./gen/penstock/sandbox/v1/sandbox_pb.js";
import type { SeedFileSchema } from "./gen/penstock/sandbox/v1/sandbox_service_pb.js";
import { CallClassSchema } from "./gen/penstock/trajectory/v1/trajectory_pb.js";
import { duration, number } from "./wire.js";

/** What to run: a line for the sandbox's shell, or an argument vector. */
export type Command =
  | string
  | ({ readonly argv: readonly string[]; readonly shell?: never } & CommandOptions)
  | ({ readonly shell: string; readonly argv?: never } & CommandOptions);

export interface CommandOptions {
  readonly env?: Readonly<Record<string, string>>;
  /** Appears in no log and no listing. */
  readonly secretEnv?: Readonly<Record<string, string>>;
  readonly cwd?: string;
  readonly timeoutMs?: number;
  readonly user?: string;
}

/** Files to put in place, by path: absolute, or relative to the working directory. */
export type Files = Readonly<Record<string, string | Uint8Array>>;

/** How a reward is made, after the agent is dead. */
export interface Verifier {
  readonly commands: readonly Command[];
  /** Absent while the agent runs. */
  readonly files?: Files;
  /** By the share of commands that passed (the default), or by a number in the file that `PENSTOCK_REWARD_FILE` names. */
  readonly reward?: "passed_share" | "file";
  /** Default: [0, 1]. */
  readonly range?: readonly [number, number];
  readonly commandTimeoutMs?: number;
  /**
   * Where it works: in a fork of the prepared state, with what the agent changed below `changesBelow`, or in the agent's sandbox
   * (false). Default: in a fork wherever the backend can.
   */
  readonly freshFork?: boolean;
  /** Paths and globs that are put back into the prepared state first. */
  readonly restore?: readonly string[];
  readonly changesBelow?: readonly string[];
  /** The components that the reward file must have, and their ranges. */
  readonly componentRanges?: Readonly<Record<string, readonly [number, number]>>;
  /** The image in which it is graded, in a sandbox that has nothing but the agent's changes. */
  readonly image?: string;
  /** Of the sandbox in which it is graded, where they are not the agent's. */
  readonly resources?: Resources;
  /** The user of the sandbox of its image. Default: the backend's ordinary user. */
  readonly user?: string;
  /**
   * Absolute paths that it gets whole from the agent's sandbox, but for names that match `exclude`. There are no changes then but
   * those below `changesBelow`.
   */
  readonly copies?: readonly (string | { readonly path: string; readonly exclude?: readonly string[] })[];
  /** Run in the agent's sandbox before anything is read from it, whatever their ends. */
  readonly collect?: readonly Command[];
}

/** Limits of a sandbox; default: the operator's. One that the backend cannot enforce is refused. */
export interface Resources {
  readonly cpu?: number;
  readonly memoryBytes?: number;
  readonly pids?: number;
  readonly diskBytes?: number;
}

/** What an agent shall do, and how one sees whether it did. */
export interface Task {
  readonly taskId: string;
  readonly instruction: string;
  readonly files?: Files;
  readonly setup?: readonly Command[];
  readonly verifier?: Verifier;
  readonly env?: Readonly<Record<string, string>>;
  /** Carried through to the trajectory. */
  readonly metadata?: JsonObject;
}

/** Who answers where the trainer does not, and whose tokenizer makes the prompts. */
export type Source =
  | ({ readonly inference: string; readonly adapter?: string } & Reading)
  | { readonly upstream: string; readonly model?: string }
  | { readonly baseUrl: string; readonly apiKey: string; readonly model?: string }
  | ({ readonly tokenizer: string } & Reading);

/** How text becomes tokens and back. */
export interface Reading {
  /** Reads tool calls, for templates that do not show how they are written; default: the service's, or what the template shows. */
  readonly toolCallParser?: string;
  /** How control tokens are read that texts of a conversation spell; default: plain, as the text that they are. */
  readonly controlTokens?: "plain" | "parse";
}

/** The calls of a rollout that a model answers: those that match each condition that is set; at least one is. */
export interface CallRule {
  /** Position among the rollout's calls, from 0: [from, until). */
  readonly fromIndex?: number;
  readonly untilIndex?: number;
  /** How many answers the call's prompt continues, token for token: [from, until). 0 is a conversation's first call. */
  readonly fromTurn?: number;
  readonly untilTurn?: number;
  readonly callClasses?: readonly ("main" | "sub_agent" | "compaction" | "title" | "probe" | "edit" | "retry")[];
}

/** One of several models that answer a rollout's calls. The first whose name and `calls` fit answers a call. */
export interface RolloutModel {
  /** The policy, which has versions of its own: 1 to 128 of letters, digits and `_ . -`. */
  readonly policyId: string;
  /** That the agent requests. Default: any name that no other model has. */
  readonly name?: string;
  /** Default: the rollout's. One of its own has the tokenizer and chat template of the rollout's. */
  readonly source?: Source;
  /** Whether its tokens may be trained; if not, they are context. Default: true. */
  readonly trained?: boolean;
  /** Which versions may answer. Default: as the rollout's `policy` for a trained model, else any. */
  readonly policy?: { readonly minVersion?: number; readonly maxStaleness?: number };
  /** Which calls it answers. The last model of a name, and no other, has none: it answers what is left. */
  readonly calls?: CallRule;
  /** In gate mode, whether `source` answers at once and no trainer gets the call. Default: if it is untrained and has a source. */
  readonly delegated?: boolean;
}

/** A rollout's settings beside its task. */
export interface RolloutOptions {
  /** Default: interception_gate. */
  readonly mode?: "interception_gate" | "transparent_proxy" | "black_box";
  /** Default: the operator's default inference service. */
  readonly source?: Source;
  /** Options of the agent's spec. */
  readonly options?: JsonObject;
  /** Whether the agent's permission prompts are skipped. */
  readonly skipPermissions?: boolean;
  readonly sandbox?: {
    readonly backend?: string;
    readonly image?: string;
    readonly user?: string;
    readonly ownKernel?: boolean;
    /** Default: unless nothing is ever replayed. */
    readonly repeatable?: boolean;
    /** Tools of the task, as contents of locks: a requirements file with hashes, a package-lock.json, Debian packages. */
    readonly packages?: { readonly python?: string; readonly npm?: string; readonly debian?: string };
    readonly resources?: Resources;
  };
  readonly limits?: {
    readonly prepareMs?: number;
    readonly setupMs?: number;
    readonly agentMs?: number;
    readonly verifyMs?: number;
  };
  /** Of this rollout at the gate; what is absent is unlimited. */
  readonly budgets?: {
    readonly maxCalls?: number;
    readonly maxPromptTokens?: number;
    readonly maxCompletionTokens?: number;
    readonly maxTotalTokens?: number;
    readonly maxTokensPerCall?: number;
    readonly callTimeoutMs?: number;
    readonly wallTimeMs?: number;
    readonly maxToolCalls?: number;
  };
  /** Which weights may answer. */
  readonly policy?: { readonly minVersion?: number; readonly maxStaleness?: number };
  /** Several models, or policies, that answer the calls by name, turn or class. Default: one, `source`. */
  readonly models?: readonly RolloutModel[];
  readonly runId?: string;
  readonly labels?: Readonly<Record<string, string>>;
  /** For the agent's option `seed`; in a group, seed + index. */
  readonly seed?: number;
  /** Replaces, field by field, what the agent asks for. */
  readonly sampling?: Sampling;
  /** How often it may be tried in all, where a failure says nothing about the policy. Default 1. */
  readonly maxAttempts?: number;
  /** Results of `penstock tasks assay`: a task without a passing one is refused (`ASSAY_REQUIRED`). */
  readonly requireAssay?: Assays;
}

/** The proto of all that defines a rollout. Throws FailedPrecondition ASSAY_REQUIRED. */
export function specOf(task: Task, agent: string, options: RolloutOptions): RolloutSpec {
  const { sandbox, limits, budgets, policy, source, runId, seed, sampling, maxAttempts } = options;
  const spec = create(RolloutSpecSchema, {
    task: taskOf(task),
    agent: { name: agent, options: options.options ?? {}, skipPermissions: options.skipPermissions ?? false },
    mode: number(ModeSchema, options.mode ?? "interception_gate"),
    labels: { ...options.labels },
    source: source && sourceOf(source),
    sandbox: sandbox && { ...sandbox, resources: sandbox.resources && resourcesOf(sandbox.resources) },
    limits: limits && {
      prepare: duration(limits.prepareMs),
      setup: duration(limits.setupMs),
      agent: duration(limits.agentMs),
      verify: duration(limits.verifyMs),
    },
    budgets: budgets && {
      maxCalls: budgets.maxCalls,
      maxPromptTokens: whole(budgets.maxPromptTokens),
      maxCompletionTokens: whole(budgets.maxCompletionTokens),
      maxTotalTokens: whole(budgets.maxTotalTokens),
      maxTokensPerCall: budgets.maxTokensPerCall,
      callTimeout: duration(budgets.callTimeoutMs),
      wallTime: duration(budgets.wallTimeMs),
      maxToolCalls: budgets.maxToolCalls,
    },
    policy: policy && policyOf(policy),
    models: (options.models ?? []).map(modelOf),
    runId,
    seed: whole(seed),
    samplingOverride: sampling,
    maxAttempts,
  });
  options.requireAssay?.require(spec);
  return spec;
}

export function taskOf(task: Task): MessageInitShape<typeof TaskSchema> {
  return {
    taskId: task.taskId,
    instruction: task.instruction,
    files: filesOf(task.files),
    setup: (task.setup ?? []).map(commandOf),
    verifier: task.verifier && verifierOf(task.verifier),
    env: { ...task.env },
    metadata: Object.keys(task.metadata ?? {}).length > 0 ? task.metadata : undefined,
  };
}

/** A verifier as it travels. */
export function verifierOf(verifier: Verifier): MessageInitShape<typeof VerifierSchema> {
  const { range, componentRanges = {} } = verifier;
  return {
    files: filesOf(verifier.files),
    commands: verifier.commands.map(commandOf),
    reward: { case: verifier.reward === "file" ? "rewardFile" : "passedShare", value: {} },
    rangeMin: range?.[0],
    rangeMax: range?.[1],
    commandTimeout: duration(verifier.commandTimeoutMs),
    freshFork: verifier.freshFork,
    restore: [...(verifier.restore ?? [])],
    changesBelow: [...(verifier.changesBelow ?? [])],
    componentRanges: Object.fromEntries(
      Object.entries(componentRanges).map(([name, [min, max]]) => [name, { min, max }]),
    ),
    image: verifier.image ?? "",
    resources: verifier.resources && resourcesOf(verifier.resources),
    user: verifier.user ?? "",
    copies: (verifier.copies ?? []).map((copied) =>
      typeof copied === "string" ? { path: copied } : { path: copied.path, exclude: [...(copied.exclude ?? [])] },
    ),
    collect: (verifier.collect ?? []).map(commandOf),
  };
}

export function filesOf(files: Files = {}): MessageInitShape<typeof SeedFileSchema>[] {
  return Object.entries(files).map(([path, content]) => ({
    path,
    content: typeof content === "string" ? new TextEncoder().encode(content) : content,
  }));
}

/** A command as it travels. Throws InvalidArgument COMMAND. */
export function commandOf(command: Command): MessageInitShape<typeof CommandSchema> {
  if (typeof command === "string") {
    return { command: { case: "shell", value: command } };
  }
  if ((command.argv === undefined) === (command.shell === undefined)) {
    throw new InvalidArgument("A command must have either argv or shell", { reason: "COMMAND" });
  }
  const { env = {}, secretEnv = {}, cwd = "", user = "" } = command;
  return {
    command:
      command.argv === undefined
        ? { case: "shell", value: command.shell }
        : { case: "argv", value: { args: [...command.argv] } },
    env: { ...env },
    secretEnv: { ...secretEnv },
    cwd,
    user,
    timeout: duration(command.timeoutMs),
  };
}

function readingOf({ toolCallParser = "", controlTokens = "plain" }: Reading) {
  return {
    toolCallParser,
    controlTokens: controlTokens === "parse" ? ControlTokens.PARSE : ControlTokens.UNSPECIFIED,
  };
}

function sourceOf(source: Source): MessageInitShape<typeof ModelSourceSchema> {
  if ("inference" in source) {
    return {
      source: { case: "inference", value: { name: source.inference, adapter: source.adapter ?? "" } },
      ...readingOf(source),
    };
  }
  if ("tokenizer" in source) {
    return { source: { case: "tokenizer", value: { name: source.tokenizer } }, ...readingOf(source) };
  }
  const { model = "" } = source;
  return "upstream" in source
    ? { source: { case: "upstream", value: { endpoint: { case: "name", value: source.upstream }, model } } }
    : {
        source: {
          case: "upstream",
          value: {
            endpoint: { case: "caller", value: { baseUrl: source.baseUrl, apiKey: source.apiKey } },
            model,
          },
        },
      };
}

function policyOf({ minVersion, maxStaleness }: NonNullable<RolloutOptions["policy"]>) {
  return { minVersion: whole(minVersion), maxStaleness: whole(maxStaleness) };
}

function modelOf(model: RolloutModel): MessageInitShape<typeof RolloutModelSchema> {
  const { calls, policy, source } = model;
  return {
    policyId: model.policyId,
    name: model.name ?? "",
    source: source && sourceOf(source),
    trained: model.trained,
    policy: policy && policyOf(policy),
    calls: calls && { ...calls, callClasses: (calls.callClasses ?? []).map((one) => number(CallClassSchema, one)) },
    delegated: model.delegated,
  };
}

function resourcesOf(given: Resources): MessageInitShape<typeof ResourcesSchema> {
  return {
    cpu: given.cpu,
    memoryBytes: whole(given.memoryBytes),
    pids: given.pids,
    diskBytes: whole(given.diskBytes),
  };
}

function whole(value: number | undefined): bigint | undefined {
  return value === undefined ? undefined : BigInt(value);
}
