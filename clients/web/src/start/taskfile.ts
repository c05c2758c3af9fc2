// A task file that is pasted into the form, as far as a page can read one: without files of a disk.
//
// The keys are those of `penstock tasks schema` (keys.json; a test compares them). What is not known, or not taken here, is refused by
// name and not left out; whether values hold is the driver's to say.
import { create, type JsonObject, type MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { type CopiedPathSchema, LimitsSchema, type McpServerSchema, SandboxChoiceSchema, TaskSchema } from "@gen/penstock/driver/v1/rollout_pb";
import { BudgetsSchema } from "@gen/penstock/interception/v1/interception_pb";
import type { CommandSchema } from "@gen/penstock/sandbox/v1/process_service_pb";
import type { ResourcesSchema } from "@gen/penstock/sandbox/v1/sandbox_pb";
import type { SeedFileSchema } from "@gen/penstock/sandbox/v1/sandbox_service_pb";

import { nearest } from "../lib/nearest";
import KEYS from "./keys.json";
import { linesOf, readYaml, YamlError } from "./yaml";

/** What is wrong with a task file: the key, its line from 1 where it stands in the file, and why. */
export class TaskFileError extends Error {
  constructor(
    readonly key: string,
    readonly why: string,
    readonly line?: number,
  ) {
    super([...(key ? [`${key}: `] : []), ...(line === undefined ? [] : [`line ${line}: `]), why].join(""));
  }
}

/** What a task file says of a rollout; what is absent is the driver's to choose. */
export interface TaskFile {
  readonly task: MessageInitShape<typeof TaskSchema>;
  readonly sandbox?: MessageInitShape<typeof SandboxChoiceSchema>;
  readonly limits?: MessageInitShape<typeof LimitsSchema>;
  readonly budgets?: MessageInitShape<typeof BudgetsSchema>;
  readonly labels: Record<string, string>;
  readonly keepEndState?: boolean;
  /** For the agent, whichever it is. */
  readonly mcpServers?: MessageInitShape<typeof McpServerSchema>[];
}

type Mapping = Record<string, unknown>;

function mapping(value: unknown, key: string, known: readonly string[]): Mapping {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new TaskFileError(key, "is a mapping");
  const found = value as Mapping;
  for (const name of Object.keys(found))
    if (!known.includes(name)) {
      const meant = nearest(name, known);
      throw new TaskFileError(key ? `${key}.${name}` : name, meant ? `is not known; did you mean ${meant}?` : `is not known; there are ${known.join(", ")}`);
    }
  return found;
}

function text(value: unknown, key: string): string {
  if (typeof value !== "string") throw new TaskFileError(key, "is a text");
  return value;
}

function list<T>(value: unknown, key: string, each: (item: unknown, key: string) => T): T[] {
  if (value === undefined || value === null) return [];
  if (!Array.isArray(value)) throw new TaskFileError(key, "is a list");
  return value.map((item, index) => each(item, `${key}.${index}`));
}

function texts(value: unknown, key: string): Record<string, string> {
  if (value === undefined || value === null) return {};
  if (typeof value !== "object" || Array.isArray(value)) throw new TaskFileError(key, "is a mapping of texts");
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, text(item, `${key}.${name}`)]));
}

function number(value: unknown, key: string): number {
  if (typeof value !== "number" || !Number.isFinite(value)) throw new TaskFileError(key, "is a number");
  return value;
}

/** A switch that is given as anything else is not off: many of them make a rollout safer. */
function flag(value: unknown, key: string): boolean {
  if (value === undefined) return false;
  if (typeof value !== "boolean") throw new TaskFileError(key, "is true or false");
  return value;
}

/** A number, or a text with octal digits. */
function permissionBits(value: unknown, key: string): number {
  const bits = typeof value === "string" && /^(0o)?[0-7]+$/.test(value) ? parseInt(value.replace(/^0o/, ""), 8) : value;
  if (typeof bits !== "number" || !Number.isInteger(bits) || bits < 0 || bits > 0o7777)
    throw new TaskFileError(key, 'is permission bits, for example "0644"');
  return bits;
}

const seconds = (value: unknown, key: string) => durationFromMs(Math.round(number(value, key) * 1000));

const UNITS: Readonly<Record<string, number>> = { "": 1, K: 1e3, M: 1e6, G: 1e9, KI: 2 ** 10, MI: 2 ** 20, GI: 2 ** 30 };

function size(value: unknown, key: string): bigint {
  if (typeof value === "number") return BigInt(Math.round(value));
  const found = /^(\d+(?:\.\d+)?)\s*([KMG]I?)?B?$/.exec(text(value, key).trim().toUpperCase());
  if (!found) throw new TaskFileError(key, "is a number of bytes, or a text such as 512MiB");
  return BigInt(Math.round(Number(found[1]) * (UNITS[found[2] ?? ""] ?? 1)));
}

function command(value: unknown, key: string): MessageInitShape<typeof CommandSchema> {
  if (typeof value === "string") return { command: { case: "shell", value } };
  if (Array.isArray(value)) return { command: { case: "argv", value: { args: list(value, key, text) } } };
  const given = mapping(value, key, KEYS.command);
  if ((given["argv"] === undefined) === (given["shell"] === undefined)) throw new TaskFileError(key, "has argv or shell");
  return {
    command:
      given["shell"] === undefined
        ? { case: "argv", value: { args: list(given["argv"], `${key}.argv`, text) } }
        : { case: "shell", value: text(given["shell"], `${key}.shell`) },
    env: texts(given["env"], `${key}.env`),
    cwd: given["cwd"] === undefined ? "" : text(given["cwd"], `${key}.cwd`),
    user: given["user"] === undefined ? "" : text(given["user"], `${key}.user`),
    ...(given["timeout"] === undefined ? {} : { timeout: seconds(given["timeout"], `${key}.timeout`) }),
  };
}

function file(value: unknown, key: string): MessageInitShape<typeof SeedFileSchema> {
  const given = mapping(value, key, KEYS.file);
  if (given["from"] !== undefined) throw new TaskFileError(`${key}.from`, "a page cannot read files: set content, or use `penstock rollout`");
  const content =
    given["content"] === undefined
      ? Uint8Array.from(atob(text(given["content_base64"], `${key}.content_base64`)), (letter) => letter.charCodeAt(0))
      : new TextEncoder().encode(text(given["content"], `${key}.content`));
  const mode = given["mode"];
  return { path: text(given["path"], `${key}.path`), content, ...(mode === undefined ? {} : { mode: permissionBits(mode, `${key}.mode`) }) };
}

function resources(value: unknown, key: string): MessageInitShape<typeof ResourcesSchema> {
  const given = mapping(value, key, KEYS.resources);
  return {
    ...(given["cpu"] === undefined ? {} : { cpu: number(given["cpu"], `${key}.cpu`) }),
    ...(given["memory_bytes"] === undefined ? {} : { memoryBytes: size(given["memory_bytes"], `${key}.memory_bytes`) }),
    ...(given["pids"] === undefined ? {} : { pids: number(given["pids"], `${key}.pids`) }),
    ...(given["disk_bytes"] === undefined ? {} : { diskBytes: size(given["disk_bytes"], `${key}.disk_bytes`) }),
    ...(given["inodes"] === undefined ? {} : { inodes: size(given["inodes"], `${key}.inodes`) }),
  };
}

function copiedPath(value: unknown, key: string): MessageInitShape<typeof CopiedPathSchema> {
  if (typeof value === "string") return { path: value };
  const given = mapping(value, key, KEYS.copiedpath);
  return { path: text(given["path"], `${key}.path`), exclude: list(given["exclude"], `${key}.exclude`, text) };
}

function verifier(value: unknown): NonNullable<MessageInitShape<typeof TaskSchema>["verifier"]> {
  const given = mapping(value, "verifier", KEYS.verifier);
  const pair = (item: unknown, key: string) => {
    const [min, max] = list(item, key, number);
    if (min === undefined || max === undefined) throw new TaskFileError(key, "is a list of two numbers");
    return { min, max };
  };
  if (given["build"] !== undefined) throw new TaskFileError("verifier.build", "a page cannot build images: set image, or use `penstock rollout`");
  if (given["judge"] !== undefined) throw new TaskFileError("verifier.judge", "is not supported by the form: use `penstock rollout`");
  const range = given["range"] === undefined ? null : pair(given["range"], "verifier.range");
  const reward = given["reward"] ?? "passed_share";
  if (reward !== "file" && reward !== "passed_share") throw new TaskFileError("verifier.reward", "is file or passed_share");
  return {
    commands: list(given["commands"], "verifier.commands", command),
    files: list(given["files"], "verifier.files", file),
    reward: reward === "file" ? { case: "rewardFile", value: {} } : { case: "passedShare", value: {} },
    ...(range ? { rangeMin: range.min, rangeMax: range.max } : {}),
    ...(given["command_timeout"] === undefined ? {} : { commandTimeout: seconds(given["command_timeout"], "verifier.command_timeout") }),
    ...(given["fresh_fork"] === undefined ? {} : { freshFork: flag(given["fresh_fork"], "verifier.fresh_fork") }),
    restore: list(given["restore"], "verifier.restore", text),
    changesBelow: list(given["changes_below"], "verifier.changes_below", text),
    image: given["image"] === undefined ? "" : text(given["image"], "verifier.image"),
    copies: list(given["copies"], "verifier.copies", copiedPath),
    collect: list(given["collect"], "verifier.collect", command),
    user: given["user"] === undefined ? "" : text(given["user"], "verifier.user"),
    ...(given["resources"] === undefined ? {} : { resources: resources(given["resources"], "verifier.resources") }),
    componentRanges: Object.fromEntries(
      Object.entries((given["component_ranges"] ?? {}) as Mapping).map(([name, item]) => [name, pair(item, `verifier.component_ranges.${name}`)]),
    ),
  };
}

function limits(value: unknown): MessageInitShape<typeof LimitsSchema> {
  const given = mapping(value, "limits", KEYS.limits);
  return Object.fromEntries(Object.entries(given).map(([name, item]) => [name, seconds(item, `limits.${name}`)]));
}

function mcpServer(value: unknown, key: string): MessageInitShape<typeof McpServerSchema> {
  const given = mapping(value, key, KEYS.mcpserver);
  const args = list(given["args"], `${key}.args`, text);
  const url = given["url"] === undefined ? "" : text(given["url"], `${key}.url`);
  if (Boolean(args.length) === Boolean(url)) throw new TaskFileError(key, "has args (a program) or url");
  const env = texts(given["env"], `${key}.env`);
  if (url && Object.keys(env).length) throw new TaskFileError(`${key}.env`, "is of a program, but url is set");
  return {
    name: text(given["name"], `${key}.name`),
    transport: url ? { case: "url", value: url } : { case: "stdio", value: { args, env } },
  };
}

const COUNTS = { max_calls: "maxCalls", max_tool_calls: "maxToolCalls" } as const;
const AMOUNTS = {
  max_prompt_tokens: "maxPromptTokens",
  max_completion_tokens: "maxCompletionTokens",
  max_total_tokens: "maxTotalTokens",
  max_tokens_per_call: "maxTokensPerCall",
  max_request_bytes: "maxRequestBytes",
  max_request_bytes_per_call: "maxRequestBytesPerCall",
} as const;
const TIMES = { call_timeout: "callTimeout", wall_time: "wallTime" } as const;

function budgets(value: unknown): MessageInitShape<typeof BudgetsSchema> {
  const given = mapping(value, "budgets", KEYS.budgets);
  if (given["call_rate"] !== undefined) throw new TaskFileError("budgets.call_rate", "is not supported by the form: use `penstock rollout`");
  const made = create(BudgetsSchema);
  for (const [name, item] of Object.entries(given)) {
    const key = `budgets.${name}`;
    const camel = { ...COUNTS, ...AMOUNTS, ...TIMES }[name as keyof typeof COUNTS];
    const field = BudgetsSchema.field[camel];
    if (!field) throw new TaskFileError(key, "is not known");
    const amount = name in TIMES ? seconds(item, key) : field.fieldKind === "scalar" && isLong(field.scalar) ? size(item, key) : number(item, key);
    Object.assign(made, { [camel]: amount });
  }
  return made;
}

/** 64-bit scalars are bigint in messages. */
const isLong = (scalar: number) => [3, 4, 6, 16, 18].includes(scalar);

function sandbox(value: unknown): MessageInitShape<typeof SandboxChoiceSchema> {
  const given = mapping(value, "sandbox", KEYS.sandbox);
  for (const key of ["setup_network", "agent_network", "verifier_network", "companions"])
    if (given[key] !== undefined) throw new TaskFileError(`sandbox.${key}`, "is not supported by the form: use `penstock rollout`");
  if (given["packages"] !== undefined) throw new TaskFileError("sandbox.packages", "a page cannot read files: use `penstock rollout`");
  return {
    backend: text(given["backend"] ?? "", "sandbox.backend"),
    image: text(given["image"] ?? "", "sandbox.image"),
    user: text(given["user"] ?? "", "sandbox.user"),
    ownKernel: flag(given["own_kernel"], "sandbox.own_kernel"),
    ...(given["repeatable"] === undefined ? {} : { repeatable: flag(given["repeatable"], "sandbox.repeatable") }),
    ...(given["resources"] === undefined ? {} : { resources: resources(given["resources"], "sandbox.resources") }),
  };
}

/** Reads a task file. Throws TaskFileError. */
export function readTaskFile(source: string): TaskFile {
  try {
    return read(source);
  } catch (error) {
    if (!(error instanceof TaskFileError)) throw error;
    throw error.key ? new TaskFileError(error.key, error.why, lineOf(error.key, linesOf(source))) : error;
  }
}

/** The line of a key, or of the nearest one around it that the file has. */
function lineOf(key: string, lines: ReadonlyMap<string, number>): number | undefined {
  for (let at = key; at; at = at.slice(0, Math.max(0, at.lastIndexOf(".")))) {
    const line = lines.get(at);
    if (line !== undefined) return line;
  }
  return undefined;
}

function read(source: string): TaskFile {
  let content: unknown;
  try {
    content = readYaml(source);
  } catch (error) {
    throw error instanceof YamlError ? new TaskFileError(error.key, error.why) : error;
  }
  const given = mapping(content, "", KEYS.task);
  for (const key of ["instruction_file", "build"])
    if (given[key] !== undefined) throw new TaskFileError(key, "a page cannot read files: use `penstock rollout`");
  if (given["models"] !== undefined) throw new TaskFileError("models", "is not supported by the form: use `penstock rollout`");
  if (given["user"] !== undefined) throw new TaskFileError("user", "is not supported by the form: use `penstock rollout`");
  const choice = given["sandbox"] === undefined ? null : sandbox(given["sandbox"]);
  return {
    task: {
      taskId: given["task_id"] === undefined ? "pasted" : text(given["task_id"], "task_id"),
      instruction: text(given["instruction"], "instruction"),
      files: list(given["files"], "files", file),
      setup: list(given["setup"], "setup", command),
      env: texts(given["env"], "env"),
      keepDiff: flag(given["keep_diff"], "keep_diff"),
      keepFiles: flag(given["keep_files"], "keep_files"),
      ...(given["verifier"] === undefined ? {} : { verifier: verifier(given["verifier"]) }),
      ...(given["metadata"] === undefined ? {} : { metadata: given["metadata"] as JsonObject }),
    },
    ...(choice || given["image"] !== undefined ? { sandbox: { ...choice, ...(given["image"] === undefined ? {} : { image: text(given["image"], "image") }) } } : {}),
    ...(given["limits"] === undefined ? {} : { limits: limits(given["limits"]) }),
    ...(given["budgets"] === undefined ? {} : { budgets: budgets(given["budgets"]) }),
    labels: texts(given["labels"], "labels"),
    mcpServers: list(given["mcp_servers"], "mcp_servers", mcpServer),
    ...(given["keep_end_state"] === undefined ? {} : { keepEndState: flag(given["keep_end_state"], "keep_end_state") }),
  };
}
