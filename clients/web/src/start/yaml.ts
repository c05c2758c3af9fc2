// YAML as the command line reads it: version 1.1, of which what JSON has is left.
//
// Invariant: the same text means the same here and in `penstock rollout` (`yes` and `on` are true, 0755 is octal); what JSON does not
// have, such as a date that nobody quoted, is refused by its key.
import type { JsonValue } from "@bufbuild/protobuf";
import { boolYaml11Tag, load, NOT_RESOLVED, YAML11_SCHEMA } from "js-yaml";

/** What is wrong, at which key; the empty key is the whole text. */
export class YamlError extends Error {
  constructor(
    readonly key: string,
    readonly why: string,
  ) {
    super(key ? `${key}: ${why}` : why);
  }
}

// PyYAML leaves y and n the letters that they are.
const SCHEMA = YAML11_SCHEMA.withTags({
  ...boolYaml11Tag,
  resolve: (source, ...rest) => (/^[yn]$/i.test(source) ? NOT_RESOLVED : boolYaml11Tag.resolve(source, ...rest)),
});
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
