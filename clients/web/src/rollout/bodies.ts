/**
 * What an agent newly said in a model call: the messages of its request behind the last reply of the model.
 *
 * Requests come as the agent wrote them, in four dialects. Invariants (tested): anything at all may be in one, and what is
 * not understood is shown as the JSON that it is; a body that is no JSON is a message with its text. Of longer lists than
 * anybody reads a part is taken and the rest counted in words: a body of 32 MB can hold millions of messages.
 */

import { Dialect } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { decoded } from "./safe";

/** A message, flattened to what a page shows of it. */
export interface Said {
  readonly role: string;
  readonly parts: readonly SaidPart[];
}

export interface SaidPart {
  readonly kind: "text" | "reasoning" | "tool_call" | "tool_result" | "image" | "other";
  readonly text: string;
  /** A tool's name, or the id of the call that a result answers; a media type of an image. */
  readonly name: string;
}

type Json = Record<string, unknown>;

/** All messages of a request, in order, instructions first. */
export function messagesOf(body: Uint8Array, dialect: Dialect): Said[] {
  const text = decoded(body);
  if (text === "") return [];
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return [{ role: "request", parts: [part("text", text)] }];
  }
  if (!isJson(value)) return [{ role: "request", parts: [part("other", shown(value))] }];
  switch (dialect) {
    case Dialect.RESPONSES:
      return [...instructions(value["instructions"]), ...items(value["input"])];
    case Dialect.MESSAGES:
      return [...instructions(value["system"]), ...newest(value["messages"], message)];
    case Dialect.GENERATE_CONTENT:
      return [
        ...instructions(value["systemInstruction"] ?? value["system_instruction"]),
        ...newest(value["contents"], content),
      ];
    default:
      return newest(value["messages"], message);
  }
}

/** The messages behind the last one of the model: of a first call all of them. */
export function newMessages(messages: readonly Said[]): Said[] {
  const last = messages.findLastIndex((item) => item.role === "assistant");
  return messages.slice(last + 1);
}

/** The beginning of messages: what is shown of them, and how much is not. */
export interface Beginning {
  readonly shown: readonly Said[];
  readonly hiddenMessages: number;
  readonly hiddenParts: number;
}

/** Messages and parts that are shown before somebody asks for more, and how many more come each time. */
export const FIRST_PARTS = 100;

/** The first messages, with `most` parts between them; one without parts counts as one. The last may be cut short. */
export function beginning(messages: readonly Said[], most: number): Beginning {
  const shown: Said[] = [];
  let left = most;
  let hiddenParts = 0;
  for (const message of messages) {
    const count = message.parts.length;
    if (left > 0) shown.push(count <= left ? message : { ...message, parts: message.parts.slice(0, left) });
    hiddenParts += Math.max(0, count - Math.max(0, left));
    left -= Math.max(1, count);
  }
  return { shown, hiddenMessages: messages.length - shown.length, hiddenParts };
}

function instructions(value: unknown): Said[] {
  if (value === undefined || value === null || value === "") return [];
  const inner = isJson(value) && Array.isArray(value["parts"]) ? value["parts"] : value;
  return [{ role: "system", parts: parts(inner) }];
}

/** A message of Chat Completions, or of Messages. */
function message(value: unknown): Said {
  if (!isJson(value)) return { role: "message", parts: [part("other", shown(value))] };
  const role = value["role"];
  const answers = value["tool_call_id"];
  const made = parts(value["content"]);
  if (role === "tool" && typeof answers === "string") {
    return { role: "tool", parts: [part("tool_result", made.map((item) => item.text).join("\n"), answers)] };
  }
  for (const key of ["reasoning_content", "reasoning"]) {
    const thought = value[key];
    if (typeof thought === "string" && thought !== "") made.unshift(part("reasoning", thought));
  }
  made.push(...first(value["tool_calls"], toolCall));
  return { role: typeof role === "string" ? role : "message", parts: made };
}

/** The input of Responses: a text, or items. */
function items(value: unknown): Said[] {
  if (typeof value === "string") return [{ role: "user", parts: [part("text", value)] }];
  return newest(value, (item) => {
    if (!isJson(item)) return { role: "message", parts: [part("other", shown(item))] };
    const type = item["type"];
    if (type === "function_call" || type === "custom_tool_call") {
      return { role: "assistant", parts: [part("tool_call", asText(item["arguments"] ?? item["input"]), asText(item["name"]))] };
    }
    if (type === "function_call_output" || type === "custom_tool_call_output") {
      const output = parts(item["output"]).map((made) => made.text);
      return { role: "tool", parts: [part("tool_result", output.join("\n"), asText(item["call_id"]))] };
    }
    if (type === "reasoning") return { role: "assistant", parts: parts(item["summary"]).map((made) => ({ ...made, kind: "reasoning" })) };
    return message(item);
  });
}

/** A content of generateContent. */
function content(value: unknown): Said {
  if (!isJson(value)) return { role: "message", parts: [part("other", shown(value))] };
  const role = value["role"];
  const made = parts(value["parts"]);
  const isTool = made.length > 0 && made.every((item) => item.kind === "tool_result");
  return { role: role === "model" ? "assistant" : isTool ? "tool" : typeof role === "string" ? role : "user", parts: made };
}

/** How deep parts may hold parts; what lies deeper is shown as JSON. */
const MAX_DEPTH = 4;

function parts(value: unknown, depth = 0): SaidPart[] {
  if (value === undefined || value === null) return [];
  if (typeof value === "string") return value === "" ? [] : [part("text", value)];
  if (depth > MAX_DEPTH) return [part("other", shown(value))];
  return first(value, (item) => onePart(item, depth));
}

function onePart(value: unknown, depth: number): SaidPart {
  if (typeof value === "string") return part("text", value);
  if (!isJson(value)) return part("other", shown(value));
  const type = value["type"];
  if (type === "tool_use") return part("tool_call", asText(value["input"]), asText(value["name"]));
  if (type === "tool_result") {
    const inner = parts(value["content"], depth + 1).map((item) => item.text);
    return part("tool_result", inner.join("\n"), asText(value["tool_use_id"]));
  }
  if (type === "thinking") return part("reasoning", asText(value["thinking"]));
  if (type === "image" || type === "image_url" || type === "input_image" || value["inlineData"] !== undefined) {
    return part("image", "", "image");
  }
  const called = value["functionCall"];
  if (isJson(called)) return part("tool_call", asText(called["args"]), asText(called["name"]));
  const answered = value["functionResponse"];
  if (isJson(answered)) return part("tool_result", asText(answered["response"]), asText(answered["name"]));
  if (typeof value["text"] === "string") return part(value["thought"] === true ? "reasoning" : "text", value["text"]);
  return part("other", shown(value));
}

function toolCall(value: unknown): SaidPart {
  const inner = isJson(value) ? value["function"] : undefined;
  return isJson(inner) ? part("tool_call", asText(inner["arguments"]), asText(inner["name"])) : part("other", shown(value));
}

function part(kind: SaidPart["kind"], text: string, name = ""): SaidPart {
  return { kind, text, name };
}

function isJson(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function list(value: unknown): unknown[] {
  return Array.isArray(value) ? (value as unknown[]) : value === undefined || value === null ? [] : [value];
}

/** Messages of a request that are read: the newest. */
const MOST_MESSAGES = 2_000;
/** Parts of a message that are read: the first. */
const MOST_PARTS = 500;

function newest(value: unknown, read: (item: unknown) => Said): Said[] {
  const all = list(value);
  const made = all.slice(-MOST_MESSAGES).map(read);
  const left = all.length - made.length;
  if (left > 0) made.unshift({ role: "request", parts: [part("other", `(${left} earlier messages are not shown)`)] });
  return made;
}

function first(value: unknown, read: (item: unknown) => SaidPart): SaidPart[] {
  const all = list(value);
  const made = all.slice(0, MOST_PARTS).map(read);
  const left = all.length - made.length;
  if (left > 0) made.push(part("other", `(${left} more parts are not shown)`));
  return made;
}

function asText(value: unknown): string {
  return typeof value === "string" ? value : value === undefined ? "" : shown(value);
}

function shown(value: unknown): string {
  try {
    return JSON.stringify(value, null, 2) ?? "";
  } catch {
    return "(nested too deep to be shown)"; // the one thing that a parsed value can do to it
  }
}
