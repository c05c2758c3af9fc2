// What the form says, as the request that the driver wants; and which of its fields a violation is about.
import type { JsonObject, MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import type { RolloutSpecSchema } from "@gen/penstock/driver/v1/rollout_pb";
import { Mode, type ModelSourceSchema } from "@gen/penstock/interception/v1/interception_pb";

import type { Violation } from "../lib/errors";
import { readTaskFile, type TaskFile, TaskFileError } from "./taskfile";
import { readYaml } from "./yaml";

export interface Form {
  agent: string;
  options: string;
  how: "written" | "yaml";
  yaml: string;
  taskId: string;
  instruction: string;
  setup: string;
  verify: string;
  keepDiff: boolean;
  mode: Mode;
  endpoint: "inference" | "upstream" | "caller";
  name: string;
  baseUrl: string;
  apiKey: string;
  model: string;
  count: number;
  run: string;
  labels: string;
  backend: string;
  agentMinutes: string;
  maxCalls: string;
}

export const EMPTY: Form = {
  agent: "",
  options: "",
  how: "written",
  yaml: "",
  taskId: "adhoc",
  instruction: "",
  setup: "",
  verify: "",
  keepDiff: false,
  mode: Mode.TRANSPARENT_PROXY,
  endpoint: "inference",
  name: "",
  baseUrl: "",
  apiKey: "",
  model: "",
  count: 1,
  run: "",
  labels: "",
  backend: "",
  agentMinutes: "",
  maxCalls: "",
};

/** Errors by field of the form; the empty key is what belongs to none. */
export type FieldErrors = Readonly<Partial<Record<keyof Form | "", readonly string[]>>>;

/** Raised where the form cannot be made into a request. */
export class FormError extends Error {
  constructor(readonly errors: FieldErrors) {
    super("the form does not hold");
  }
}

const lines = (text: string) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const shells = (text: string) => lines(text).map((value) => ({ command: { case: "shell" as const, value } }));

function written(form: Form): TaskFile {
  return {
    task: {
      taskId: form.taskId.trim(),
      instruction: form.instruction,
      setup: shells(form.setup),
      keepDiff: form.keepDiff,
      ...(lines(form.verify).length ? { verifier: { commands: shells(form.verify), reward: { case: "passedShare" as const, value: {} } } } : {}),
    },
    labels: {},
  };
}

function source(form: Form): MessageInitShape<typeof ModelSourceSchema> {
  if (form.endpoint === "inference") return { source: { case: "inference", value: { name: form.name.trim() } } };
  const endpoint =
    form.endpoint === "upstream"
      ? { case: "name" as const, value: form.name.trim() }
      : { case: "caller" as const, value: { baseUrl: form.baseUrl.trim(), apiKey: form.apiKey } };
  return { source: { case: "upstream", value: { endpoint, model: form.model.trim() } } };
}

function positive(value: string, field: keyof Form, errors: Partial<Record<keyof Form | "", string[]>>): number | null {
  if (!value.trim()) return null;
  const number = Number(value);
  if (Number.isFinite(number) && number > 0) return number;
  errors[field] = ["a number greater than 0, or nothing"];
  return null;
}

/** The rollout's spec. Throws FormError with what cannot even be asked for. */
export function specOf(form: Form): MessageInitShape<typeof RolloutSpecSchema> {
  const errors: Partial<Record<keyof Form | "", string[]>> = {};
  let file: TaskFile | null = null;
  try {
    file = form.how === "yaml" ? readTaskFile(form.yaml) : written(form);
  } catch (error) {
    if (!(error instanceof TaskFileError)) throw error;
    errors.yaml = [error.message];
  }
  let options: JsonObject = {};
  try {
    const read = form.options.trim() ? readYaml(form.options) : {};
    if (typeof read !== "object" || read === null || Array.isArray(read)) throw new Error("a mapping, such as seed: 7");
    options = read;
  } catch (error) {
    errors.options = [error instanceof Error ? (error.message.split("\n")[0] ?? "") : String(error)];
  }
  const labels: Record<string, string> = { ...file?.labels };
  for (const part of form.labels.split(/[\s,]+/).filter(Boolean)) {
    const equals = part.indexOf("=");
    if (equals > 0) labels[part.slice(0, equals)] = part.slice(equals + 1);
    else errors.labels = ["written as key=value, several with spaces between them"];
  }
  const minutes = positive(form.agentMinutes, "agentMinutes", errors);
  const calls = positive(form.maxCalls, "maxCalls", errors);
  if (!Number.isInteger(form.count) || form.count < 1) errors.count = ["a whole number from 1"];
  if (!file || Object.keys(errors).length) throw new FormError(errors);
  return {
    task: file.task,
    agent: {
      name: form.agent,
      ...(Object.keys(options).length ? { options } : {}),
      ...(file.mcpServers?.length ? { mcpServers: file.mcpServers } : {}),
    },
    mode: form.mode,
    source: source(form),
    labels,
    ...(file.sandbox || form.backend ? { sandbox: { ...file.sandbox, ...(form.backend ? { backend: form.backend } : {}) } } : {}),
    ...(file.limits || minutes ? { limits: { ...file.limits, ...(minutes ? { agent: durationFromMs(minutes * 60_000) } : {}) } } : {}),
    ...(file.budgets || calls ? { budgets: { ...file.budgets, ...(calls ? { maxCalls: calls } : {}) } } : {}),
    ...(form.run.trim() ? { runId: form.run.trim() } : {}),
    ...(file.keepEndState === undefined ? {} : { keepEndState: file.keepEndState }),
  };
}

/** What the form calls its fields. */
export const LABELS: Readonly<Record<keyof Form, string>> = {
  agent: "Agent",
  options: "Agent's options",
  how: "How the task is given",
  yaml: "Task file (YAML)",
  taskId: "Task id",
  instruction: "Instruction",
  setup: "Setup",
  verify: "Verifier",
  keepDiff: "Keep what the agent changed, as a diff",
  mode: "Mode",
  endpoint: "Endpoint",
  name: "Its name",
  baseUrl: "Base URL",
  apiKey: "Key",
  model: "Model",
  count: "Rollouts",
  run: "Run",
  labels: "Labels",
  backend: "Sandbox",
  agentMinutes: "Minutes for the agent",
  maxCalls: "Most model calls",
};

/** Errors in one line, by what the form calls its fields: "Instruction: is required; Labels: ...". */
export function errorLine(errors: FieldErrors): string {
  return Object.entries(errors)
    .flatMap(([field, told]) => (told ?? []).map((one) => (field === "" ? one : `${LABELS[field as keyof Form]}: ${one}`)))
    .join("; ");
}

/** Which field of the form a field of the request is; longest first. */
const PLACES: readonly (readonly [string, keyof Form])[] = [
  ["spec.task.instruction", "instruction"],
  ["spec.task.task_id", "taskId"],
  ["spec.task.setup", "setup"],
  ["spec.task.verifier", "verify"],
  ["spec.agent.options", "options"],
  ["spec.agent", "agent"],
  ["spec.source.upstream.caller.base_url", "baseUrl"],
  ["spec.source.upstream.caller", "baseUrl"],
  ["spec.source.upstream", "name"],
  ["spec.source.inference", "name"],
  ["spec.source", "name"],
  ["spec.mode", "mode"],
  ["spec.run_id", "run"],
  ["spec.labels", "labels"],
  ["spec.limits.agent", "agentMinutes"],
  ["spec.budgets.max_calls", "maxCalls"],
  ["spec.sandbox", "backend"],
  ["options", "options"],
  ["size", "count"],
];

/** Puts the service's violations at the fields that they are about. */
export function placed(violations: readonly Violation[], form: Pick<Form, "how">): FieldErrors {
  const found: Partial<Record<keyof Form | "", string[]>> = {};
  for (const { field, description } of violations) {
    let place: keyof Form | "" = PLACES.find(([prefix]) => field === prefix || field.startsWith(`${prefix}.`) || field.startsWith(`${prefix}[`))?.[1] ?? "";
    if (form.how === "yaml" && /^spec\.task(?![a-z_])/.test(field)) place = "yaml";
    const told = place === "" || place === "yaml" ? `${field.replace(/^spec\.(task\.)?/, "")}: ${description}` : description;
    found[place] = [...(found[place] ?? []), told];
  }
  return found;
}
