/** Signed results of `penstock tasks assay`, one line per task: what decides whether a task's rollouts may start. */

import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";
import { create } from "@bufbuild/protobuf";
import { FailedPrecondition, InvalidArgument } from "./errors.js";
import { fingerprint } from "./fingerprints.js";
import { AgentChoiceSchema, LimitsSchema, type RolloutSpec, RolloutSpecSchema, SandboxChoiceSchema } from "./gen/penstock/driver/v1/rollout_pb.js";
import { BudgetsSchema } from "./gen/penstock/interception/v1/interception_pb.js";

const SCHEMA = 2;
const MOST_BYTES = 64 * 1024 * 1024;
/** In front of what is signed, so that no signature of another purpose fits. */
const CONTEXT = "penstock assay line 1\n";
const TEXTS = ["backend", "digest", "task_id", "time"] as const;
const LISTS = ["accepted", "failed"] as const;
const KEYS = [...TEXTS, ...LISTS, "passed", "schema", "signature"].sort();

interface Line {
  readonly task_id: string;
  readonly digest: string;
  readonly passed: boolean;
  readonly failed: readonly string[];
}

/**
 * The results of many tasks, as `requireAssay` of a rollout's or a group's options; of two lines with one digest the later one counts.
 *
 * A task is that very task with the sandbox, the limits and the budgets of its file and with no others: here the options of the rollout
 * say them. An image that was built is named by `penstock tasks build`.
 */
export class Assays {
  readonly #lines = new Map<string, Line>();
  readonly #ids = new Set<string>();
  readonly #origin: string;

  private constructor(lines: Iterable<Line>, origin: string) {
    for (const line of lines) {
      this.#lines.set(line.digest, line);
    }
    for (const line of this.#lines.values()) {
      this.#ids.add(line.task_id);
    }
    this.#origin = origin;
  }

  /**
   * Reads the lines that `penstock tasks assay` wrote, at most 64 MiB; the key is beside them, with the suffix `.key`, unless it is named.
   * Throws InvalidArgument ASSAY_UNREADABLE: a file cannot be read, or a line is not signed with this key.
   */
  static load(file: string, key: string = file.replace(/(?<=[^/])\.[^./]*$/, "").concat(".key")): Assays {
    const secret = read(key, 4096, "the key: ");
    if (secret.length < 32) {
      throw unreadable(key, "the key must have 32 to 4096 bytes");
    }
    const lines: Line[] = [];
    for (const [index, text] of read(file, MOST_BYTES, "").toString("utf8").split(/\r?\n/).entries()) {
      if (text === "") {
        continue;
      }
      try {
        lines.push(lineOf(text, secret));
      } catch (error) {
        throw unreadable(file, `line ${index + 1}: ${error instanceof Error ? error.message : error}`);
      }
    }
    return new Assays(lines, file);
  }

  /** Throws FailedPrecondition ASSAY_REQUIRED unless this very task passed; the violation's field is `task`. */
  require(spec: RolloutSpec): void {
    const line = this.#lines.get(digestOf(spec));
    if (line?.passed) {
      return;
    }
    const id = spec.task?.taskId ?? "";
    const why = line
      ? `did not pass its assay: ${line.failed.join(", ")}`
      : this.#ids.has(id)
        ? `has changed since its assay in ${this.#origin}: run \`penstock tasks assay\` again`
        : `has no line in ${this.#origin}: run \`penstock tasks assay\` first`;
    throw new FailedPrecondition(`task ${id} ${why}`, {
      reason: "ASSAY_REQUIRED",
      violations: [{ field: "task", description: `${id} ${why}` }],
    });
  }
}

/** A hash of everything that a task's rollouts depend on, the same in every language: of no empty message it counts that it is there. */
export function digestOf(spec: RolloutSpec): string {
  const { task, sandbox, limits, budgets, agent } = spec;
  const servers = agent?.mcpServers ?? [];
  const kept = create(RolloutSpecSchema, {
    task,
    sandbox: sandbox && fingerprint(SandboxChoiceSchema, sandbox).length > 0 ? sandbox : undefined,
    limits: limits && fingerprint(LimitsSchema, limits).length > 0 ? limits : undefined,
    budgets: budgets && fingerprint(BudgetsSchema, budgets).length > 0 ? budgets : undefined,
    agent: servers.length > 0 ? create(AgentChoiceSchema, { mcpServers: servers }) : undefined,
  });
  return createHash("sha256").update(fingerprint(RolloutSpecSchema, kept)).digest("hex");
}

function lineOf(text: string, key: Buffer): Line {
  const data: unknown = JSON.parse(text);
  if (data === null || typeof data !== "object" || !("signature" in data) || typeof data.signature !== "string") {
    throw new Error("it has no signature");
  }
  const { signature, ...given } = data as Record<string, unknown> & { signature: string };
  if (given["schema"] !== SCHEMA) {
    throw new Error(`its schema is ${JSON.stringify(given["schema"])}, not ${SCHEMA}`);
  }
  if (Object.keys(data).sort().join() !== KEYS.join()) {
    throw new Error("its keys are not those of a line");
  }
  const isText = (name: string) => typeof given[name] === "string";
  const isList = (name: string) => {
    const value = given[name];
    return Array.isArray(value) && value.every((item) => typeof item === "string");
  };
  if (typeof given["passed"] !== "boolean" || !TEXTS.every(isText)) {
    throw new Error("its values have other types");
  }
  const wrong = LISTS.find((name) => !isList(name));
  if (wrong !== undefined) {
    throw new Error(`${wrong} is not a list of codes`);
  }
  const signed = JSON.stringify(Object.fromEntries(Object.entries(given).sort(([one], [other]) => (one < other ? -1 : 1))));
  const made = createHmac("sha256", key).update(CONTEXT).update(signed).digest("hex");
  const [one, other] = [Buffer.from(made), Buffer.from(signature)];
  if (one.length !== other.length || !timingSafeEqual(one, other)) {
    throw new Error("it is not signed with this key");
  }
  return given as unknown as Line;
}

function read(file: string, most: number, what: string): Buffer {
  let content: Buffer;
  try {
    content = readFileSync(file);
  } catch (error) {
    throw unreadable(file, `${what}${error instanceof Error ? error.message : error}`);
  }
  if (content.length > most) {
    throw unreadable(file, `${what}has more than ${most} bytes`);
  }
  return content;
}

function unreadable(place: string, why: string): InvalidArgument {
  return new InvalidArgument(`${place}: ${why}`, {
    reason: "ASSAY_UNREADABLE",
    violations: [{ field: "require_assay", description: `${place}: ${why}` }],
  });
}
