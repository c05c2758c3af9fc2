// YAML as the command line reads it: version 1.1, of which what JSON has is left.
//
// Invariant: the same text means the same here and in `penstock rollout` (`yes` and `on` are true, 0755 is octal); what JSON does not
// have, such as a date that nobody quoted, is refused by its key.
import type { JsonValue } from "@bufbuild/protobuf";
import { boolYaml11Tag, type Event, EVENT_ALIAS, EVENT_DOCUMENT, EVENT_MAPPING, EVENT_POP, EVENT_SCALAR, EVENT_SEQUENCE, floatYaml11Tag, intYaml11Tag, load, NOT_RESOLVED, parseEvents, type ScalarTagDefinition, YAML11_SCHEMA } from "js-yaml";

/** What is wrong, at which key; the empty key is the whole text. */
export class YamlError extends Error {
  constructor(
    readonly key: string,
    readonly why: string,
  ) {
    super(key ? `${key}: ${why}` : why);
  }
}

/** A tag that leaves what matches a text. */
function without<T>(tag: ScalarTagDefinition<T>, texts: RegExp): ScalarTagDefinition<T> {
  return { ...tag, resolve: (source, ...rest) => (texts.test(source) ? NOT_RESOLVED : tag.resolve(source, ...rest)) };
}

// PyYAML leaves y and n the letters that they are, and -.5 a text. The command line reads numbers in base 60 (1:30) as text, too.
const SCHEMA = YAML11_SCHEMA.withTags(without(boolYaml11Tag, /^[yn]$/i), without(intYaml11Tag, /:/), without(floatYaml11Tag, /:|^[-+]\.[\d_]|^\._/));
const MAX_DEPTH = 100;

/** Reads a text. Throws YamlError. */
export function readYaml(source: string): JsonValue {
  let content: unknown;
  try {
    content = load(source, { schema: SCHEMA });
  } catch (error) {
    throw new YamlError("", `is not YAML: ${error instanceof Error ? (error.message.split("\n")[0] ?? "") : String(error)}`);
  }
  return plain(content ?? null, "", 0);
}

/** Where keys stand: their lines, from 1, by the key as errors name it ("verifier.commands.0"). Empty for what is not YAML. */
export function linesOf(source: string): ReadonlyMap<string, number> {
  const found = new Map<string, number>();
  let events: readonly Event[];
  try {
    events = parseEvents(source, {});
  } catch {
    return found;
  }
  let [line, counted] = [1, 0];
  /** Of a place that is never before the one that was asked for last. */
  const lineAt = (offset: number): number => {
    for (; counted < offset; counted += 1) if (source[counted] === "\n") line += 1;
    return line;
  };
  const startOf = (event: Event | undefined): number | undefined =>
    event?.type === EVENT_SCALAR ? event.valueStart : event?.type === EVENT_MAPPING || event?.type === EVENT_SEQUENCE ? event.start : undefined;
  let at = 0;
  /** Goes past one node, and notes what is in it. */
  const walk = (key: string, depth: number): void => {
    if (depth > MAX_DEPTH) throw new RangeError("is nested too deeply");
    const event = events[at];
    at += 1;
    if (!event || event.type === EVENT_SCALAR || event.type === EVENT_ALIAS) return;
    const within = (name: string | number): string => (key ? `${key}.${name}` : String(name));
    for (let index = 0; at < events.length && events[at]?.type !== EVENT_POP; index += 1) {
      const first = events[at];
      const start = startOf(first);
      let name = within(index);
      if (event.type === EVENT_MAPPING) {
        name = within(first?.type === EVENT_SCALAR ? source.slice(first.valueStart, first.valueEnd) : "");
        if (start !== undefined && start >= 0) found.set(name, lineAt(start));
        walk("", depth + 1);
      } else if (start !== undefined && start >= 0) found.set(name, lineAt(start));
      walk(name, depth + 1);
    }
    at += 1;
  };
  if (events[0]?.type === EVENT_DOCUMENT) at = 1;
  try {
    walk("", 0);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
  }
  return found;
}

function plain(value: unknown, key: string, depth: number): JsonValue {
  if (depth > MAX_DEPTH) throw new YamlError("", "is nested too deeply");
  const within = (name: string | number) => (key ? `${key}.${name}` : String(name));
  if (value === null || typeof value === "string" || typeof value === "boolean") return value;
  if (typeof value === "number" && Number.isFinite(value)) return value;
  if (Array.isArray(value)) {
    for (const [index, item] of value.entries()) plain(item, within(index), depth + 1);
    return value as JsonValue;
  }
  if (value instanceof Date) throw new YamlError(key, "is a date: put it in quotes");
  if (Object.prototype.toString.call(value) !== "[object Object]") throw new YamlError(key, "is nothing that JSON has: put it in quotes");
  for (const [name, item] of Object.entries(value as object)) plain(item, within(name), depth + 1);
  return value as JsonValue;
}
