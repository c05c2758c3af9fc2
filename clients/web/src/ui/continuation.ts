// What the sheet of a branch says, as the request that the driver wants; and which of its fields a violation is about.
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Role } from "@gen/penstock/chat/v1/chat_pb";
import type { MessageSchema } from "@gen/penstock/chat/v1/chat_pb";
import { Replay } from "@gen/penstock/driver/v1/rollout_pb";

import type { Violation } from "../lib/errors";

export interface Continuation {
  count: string;
  /** Who answers the call: the model, or the person, by a text or by a tool call. */
  kind: "model" | "text" | "tool";
  text: string;
  name: string;
  args: string;
  seed: string;
  /** Whether a branch goes on where its agent asks something else. */
  goesOn: boolean;
}

export const EMPTY: Continuation = { count: "8", kind: "model", text: "", name: "", args: "", seed: "", goesOn: false };

/** What the sheet calls its fields. */
export const LABELS: Readonly<Record<keyof Continuation, string>> = {
  count: "Branches",
  kind: "Answer of the call",
  text: "Text",
  name: "Tool",
  args: "Arguments",
  seed: "Seed",
  goesOn: "Let it go on if the agent asks something else",
};

/** By field: what is wrong with it. */
export type FieldErrors = Readonly<Partial<Record<keyof Continuation, string>>>;

export interface Order {
  readonly count: number;
  readonly answer?: MessageInitShape<typeof MessageSchema>;
  readonly seed?: bigint;
  readonly replay: Replay;
}

export const MOST = 256;
/** The seeds of the branches count up from the first. */
const MAX_SEED = 2n ** 63n - 1n;

/** The request's fields, or what is wrong with the sheet's. */
export function orderOf(form: Continuation): Order | { readonly errors: FieldErrors } {
  const errors: Partial<Record<keyof Continuation, string>> = {};
  const count = wholeNumber(form.count);
  if (count === null || count < 1n || count > BigInt(MOST)) errors.count = `expected a whole number from 1 to ${MOST}`;
  const seed = form.seed.trim() === "" ? undefined : wholeNumber(form.seed);
  const last = MAX_SEED - (count ?? 1n) + 1n;
  if (seed === null || (seed !== undefined && seed > last)) errors.seed = `expected a whole number from 0 to ${last}, or empty`;
  if (form.kind === "text" && form.text === "") errors.text = "is required";
  if (form.kind === "tool") {
    if (form.name.trim() === "") errors.name = "is required";
    const wrong = wrongArguments(form.args);
    if (wrong !== "") errors.args = wrong;
  }
  if (count === null || seed === null || Object.keys(errors).length > 0) return { errors };
  const answer = answerOf(form);
  return {
    count: Number(count),
    replay: form.goesOn ? Replay.UNTIL_DIVERGENCE : Replay.EXACT,
    ...(answer ? { answer } : {}),
    ...(seed === undefined ? {} : { seed }),
  };
}

function answerOf(form: Continuation): MessageInitShape<typeof MessageSchema> | undefined {
  if (form.kind === "model") return undefined;
  if (form.kind === "text") return { role: Role.ASSISTANT, parts: [{ part: { case: "text", value: { text: form.text } } }] };
  // As they are written: to read and write them again would round large numbers.
  const toolCall = { id: "given_0", name: form.name.trim(), argumentsJson: form.args.trim() || "{}" };
  return { role: Role.ASSISTANT, parts: [{ part: { case: "toolCall", value: toolCall } }] };
}

function wholeNumber(text: string): bigint | null {
  return /^\d{1,20}$/.test(text.trim()) ? BigInt(text.trim()) : null;
}

function wrongArguments(text: string): string {
  if (text.trim() === "") return "";
  try {
    const read: unknown = JSON.parse(text);
    return typeof read === "object" && read !== null && !Array.isArray(read) ? "" : 'expected a JSON object, such as {"command": "ls"}';
  } catch (error) {
    return `not JSON: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** Which field of the sheet a field of the request is. */
function placeOf(field: string, kind: Continuation["kind"]): keyof Continuation | undefined {
  if (field === "count" || field === "seed") return field;
  if (field === "replay") return "goesOn";
  if (field === "answer" || field.startsWith("answer.")) return kind === "model" ? "kind" : kind === "text" ? "text" : field.endsWith(".name") ? "name" : "args";
  return undefined;
}

/** Puts the service's violations at the fields that they are about; the others are left to the notice. */
export function placed(violations: readonly Violation[], kind: Continuation["kind"]): FieldErrors {
  const found: Partial<Record<keyof Continuation, string>> = {};
  for (const { field, description } of violations) {
    const place = placeOf(field, kind);
    if (place) found[place] = found[place] ? `${found[place]}; ${description}` : description;
  }
  return found;
}
