// What is looked for: words, and conditions like agent:shell or label:team=a. All must hold.
import { nearest } from "../lib/nearest";
import type { Row, State } from "./board";

export interface Filter {
  readonly words: readonly string[];
  readonly states: ReadonlySet<State>;
  readonly agent: string;
  readonly run: string;
  readonly group: string;
  readonly task: string;
  readonly namespace: string;
  readonly driver: string;
  readonly labels: readonly (readonly [string, string | null])[];
}

const STATES: Readonly<Record<string, readonly State[]>> = {
  waiting: ["waiting"],
  running: ["running"],
  live: ["waiting", "running"],
  ended: ["completed", "failed", "cancelled"],
  completed: ["completed"],
  failed: ["failed"],
  cancelled: ["cancelled"],
};

/** The states that `state:` knows. */
export const STATE_NAMES = Object.keys(STATES);

/** Reads a filter; what is no condition is a word. Never fails: half of a condition is what people type first. */
export function parseFilter(text: string): Filter {
  const found = { words: [] as string[], states: new Set<State>(), agent: "", run: "", group: "", task: "", namespace: "", driver: "" };
  const labels: [string, string | null][] = [];
  for (const part of text.trim().split(/\s+/).filter(Boolean)) {
    const colon = part.indexOf(":");
    const key = part.slice(0, Math.max(colon, 0)).toLowerCase();
    const value = part.slice(colon + 1);
    if (key === "state" && STATES[value.toLowerCase()]) for (const state of STATES[value.toLowerCase()] ?? []) found.states.add(state);
    else if ((key === "agent" || key === "run" || key === "group" || key === "task" || key === "namespace" || key === "driver") && value) found[key] = value;
    else if (key === "label" && value) {
      const equals = value.indexOf("=");
      labels.push(equals < 0 ? [value, null] : [value.slice(0, equals), value.slice(equals + 1)]);
    } else found.words.push(part.toLowerCase());
  }
  return { ...found, labels };
}

/** What is written as a condition and is none, in words: it is looked for as a word, and hardly ever found. */
export function misread(text: string): string[] {
  return text
    .trim()
    .split(/\s+/)
    .flatMap((part) => {
      const [, key = "", value = ""] = /^([a-z]+):(.*)$/i.exec(part) ?? [];
      if (key === "") return [];
      const name = key.toLowerCase();
      if (name === "state" && value && !STATES[value.toLowerCase()]) return [`There is no state ${value}${meant(nearest(value.toLowerCase(), STATE_NAMES))} There are ${STATE_NAMES.join(", ")}.`];
      if (KEYS.includes(name)) return [];
      const near = nearest(name, KEYS);
      return [`There is no key ${key}:${meant(near && `${near}:`)} There are ${KEYS.map((one) => `${one}:`).join(", ")}.`];
    });
}

const KEYS: readonly string[] = ["state", "agent", "run", "group", "task", "namespace", "driver", "label"];
const meant = (name: string | undefined): string => (name ? `; did you mean ${name}?` : ".");

/** Whether a row is wanted. */
export function matches(row: Row, filter: Filter): boolean {
  if (filter.states.size && !filter.states.has(row.state)) return false;
  if (filter.agent && row.agent !== filter.agent) return false;
  if (filter.run && row.run !== filter.run) return false;
  if (filter.group && row.group !== filter.group) return false;
  if (filter.task && row.task !== filter.task) return false;
  if (filter.namespace && row.namespace !== filter.namespace) return false;
  if (filter.driver && row.driver !== filter.driver) return false;
  for (const [key, value] of filter.labels)
    if (!Object.hasOwn(row.labels, key) || (value !== null && row.labels[key] !== value)) return false;
  if (!filter.words.length) return true;
  const text = haystack(row);
  return filter.words.every((word) => text.includes(word));
}

const haystacks = new WeakMap<Row, string>();

function haystack(row: Row): string {
  let text = haystacks.get(row);
  if (text === undefined) {
    const labels = Object.entries(row.labels).map(([key, value]) => `${key}=${value}`);
    text = [row.id, row.namespace, row.driver, row.group, row.run, row.task, row.agent, row.state, row.reason, row.cause, ...labels].join("\n").toLowerCase();
    haystacks.set(row, text);
  }
  return text;
}
