/**
 * Which of a completion's tokens are its reasoning, its text and its tool calls.
 *
 * No model's markup is known here: the message that the service parsed from the tokens is looked up in what the tokens
 * spell. Invariant (tested): segments are a partition of the tokens, in order; what is found nowhere belongs to the segment
 * that follows it, and a message that cannot be found at all leaves one segment of text.
 */

/** A part of a message as far as it is needed to find it. */
export interface Sought {
  readonly kind: "reasoning" | "text" | "tool_call";
  /** What the model wrote: the text, or a tool call's arguments. */
  readonly text: string;
  /** A tool's name. */
  readonly name?: string;
}

/** Tokens [start, end); `part` is the index of the message's part. */
export interface Segment {
  readonly kind: Sought["kind"];
  readonly start: number;
  readonly end: number;
  readonly part: number;
}

/** The segments of tokens that spell `texts`. */
export function segments(texts: readonly string[], parts: readonly Sought[]): Segment[] {
  if (texts.length === 0) return [];
  const spelled = texts.join("");
  const found: Found[] = [];
  let cursor = 0;
  parts.forEach((part, index) => {
    const place = located(spelled, part, cursor);
    if (place === undefined) return;
    found.push({ part: index, kind: part.kind, start: place[0], end: place[1] });
    cursor = place[1];
  });
  if (found.length === 0) return [{ kind: "text", start: 0, end: texts.length, part: -1 }];
  return cut(texts, spelled, found);
}

/** A part that was found in the characters [start, end). */
interface Found {
  readonly part: number;
  readonly kind: Sought["kind"];
  readonly start: number;
  readonly end: number;
}

/** Where a part lies that is found from `cursor` on. */
function located(spelled: string, part: Sought, cursor: number): readonly [number, number] | undefined {
  if (part.kind === "tool_call") {
    const named = part.name === undefined || part.name === "" ? -1 : spelled.indexOf(part.name, cursor);
    const from = named < 0 ? cursor : named;
    const at = part.text === "" ? -1 : spelled.indexOf(part.text, from);
    if (at >= 0) return [named < 0 ? at : named, at + part.text.length];
    return named < 0 || part.name === undefined ? undefined : [named, named + part.name.length];
  }
  const wanted = part.text.trim();
  if (wanted === "") return undefined;
  const at = spelled.indexOf(wanted, cursor);
  return at < 0 ? undefined : [at, at + wanted.length];
}

function cut(texts: readonly string[], spelled: string, found: readonly Found[]): Segment[] {
  const made: Segment[] = [];
  let start = 0;
  let offset = 0;
  let at = 0;
  found.forEach((item, index) => {
    const next = found[index + 1];
    const boundary = next === undefined ? Number.POSITIVE_INFINITY : boundaryOf(spelled, item, next);
    while (at < texts.length && offset < boundary) {
      offset += (texts[at] ?? "").length;
      at += 1;
    }
    // Two parts may end in one token: it belongs to the first.
    if (at > start) made.push({ kind: item.kind, start, end: at, part: item.part });
    start = at;
  });
  return made;
}

/**
 * Where the markup between two parts is cut. White space ends a part, so that the next does not begin with an empty line;
 * what closes a reasoning belongs to it: all before text, up to the empty line before a tool call.
 */
function boundaryOf(spelled: string, item: Found, next: Found): number {
  const gap = spelled.slice(item.end, next.start);
  const blank = gap.length - gap.trimStart().length;
  if (item.kind !== "reasoning") return item.end + blank;
  if (next.kind !== "tool_call") return next.start;
  const paragraph = gap.lastIndexOf("\n\n");
  return item.end + (paragraph < 0 ? blank : paragraph + 2);
}
