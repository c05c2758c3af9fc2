/**
 * Sampled tokens as coloured runs.
 *
 * Adjacent tokens of one look are one run, and runs lie in chunks that end at line breaks, so that tens of thousands of
 * tokens are a few thousand elements of which a browser lays out those in view. Invariant (tested): the runs of a span are
 * a partition of its tokens, in order, and each character of a run belongs to a known token.
 */

import { stepOf } from "./scale";
import { visible } from "./safe";
import type { Vocabulary } from "./vocabulary";

/** Which weights sampled the tokens [start, end). */
export interface VersionRun {
  readonly version: bigint;
  readonly start: number;
  readonly end: number;
}

/** The tokens of one completion; arrays are as long as `ids`, logprobs absent where the source gave none. */
export interface Span {
  readonly ids: Int32Array;
  readonly logprobs: Float32Array | undefined;
  readonly versions: readonly VersionRun[];
  /** Without a vocabulary the ids stand for themselves. */
  readonly texts: readonly string[];
  readonly special: readonly boolean[];
  /** Why it is not trained; empty = it is; undefined = not known yet. */
  readonly untrained: string | undefined;
  /** What another rollout has in its place; undefined = it is looked at alone. */
  readonly counterpart?: Counterpart | undefined;
}

/** The tokens of a call of another rollout, beside those of a span. */
export interface Counterpart {
  /** Where the span itself stands. */
  readonly side: "left" | "right";
  /** For each token of the span the index of the same one there; -1 = it is not there. */
  readonly at: Int32Array;
  /** Those of the other's tokens; undefined = the source gave none. */
  readonly logprobs: Float32Array | undefined;
  /** Tokens of the span before this index follow the same tokens in both. */
  readonly sameUntil: number;
}

/** What colours say; "change" is for spans with a counterpart. */
export type Colouring = "change" | "logprob" | "version" | "none";

/** Tokens [start, end) in one look. */
export interface Run {
  readonly start: number;
  readonly end: number;
  readonly text: string;
  readonly classes: string;
}

/** Runs that are laid out as one block: tokens [start, end). */
export interface Chunk {
  readonly start: number;
  readonly end: number;
  readonly runs: readonly Run[];
}

const CHUNK_TOKENS = 300;
const MAX_CHUNK_TOKENS = 1500;
const VERSION_LOOKS = 6;

/** Little-endian int32, whatever the bytes are aligned to; a last part of a number is dropped. */
export function int32(bytes: Uint8Array): Int32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Int32Array.from({ length: bytes.byteLength >> 2 }, (_, index) => view.getInt32(index * 4, true));
}

/** Little-endian float32. */
export function float32(bytes: Uint8Array): Float32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength >> 2 }, (_, index) => view.getFloat32(index * 4, true));
}

/** A span; logprobs that are not as many as the tokens are left out. */
export function span(
  ids: Int32Array,
  logprobs: Float32Array | undefined,
  versions: readonly VersionRun[],
  vocabulary: Vocabulary | undefined,
  untrained: string | undefined,
): Span {
  const read = vocabulary?.texts(ids) ?? {
    texts: Array.from(ids, (id) => `${id} `),
    special: Array.from(ids, () => false),
  };
  return { ids, logprobs: logprobs?.length === ids.length ? logprobs : undefined, versions, untrained, ...read };
}

/** What sampled a token; undefined = nobody said. */
export function versionAt(versions: readonly VersionRun[], index: number): bigint | undefined {
  return versions.find((run) => index >= run.start && index < run.end)?.version;
}

/** The chunks of tokens [from, to) of a span. */
export function chunks(of: Span, colouring: Colouring, from = 0, to = of.ids.length): Chunk[] {
  const made: Chunk[] = [];
  let start = from;
  while (start < to) {
    const end = chunkEnd(of.texts, start, to);
    made.push({ start, end, runs: runs(of, colouring, start, end) });
    start = end;
  }
  return made;
}

function chunkEnd(texts: readonly string[], start: number, to: number): number {
  for (let at = start; at < to; at += 1) {
    const length = at + 1 - start;
    if (length >= MAX_CHUNK_TOKENS || (length >= CHUNK_TOKENS && (texts[at] ?? "").endsWith("\n"))) return at + 1;
  }
  return to;
}

/** The runs of tokens [from, to). */
export function runs(of: Span, colouring: Colouring, from: number, to: number): Run[] {
  const made: Run[] = [];
  const looks = versionLooks(of.versions);
  let start = from;
  let text = "";
  let classes = "";
  for (let at = from; at < to; at += 1) {
    const next = look(of, colouring, looks, at);
    if (next !== classes && at > start) {
      made.push({ start, end: at, text, classes });
      start = at;
      text = "";
    }
    classes = next;
    text += spelled(of, at);
  }
  if (to > start) made.push({ start, end: to, text, classes });
  return made;
}

function look(of: Span, colouring: Colouring, looks: ReadonlyMap<bigint, number>, at: number): string {
  const kind = of.special[at] === true ? "special " : "";
  if (colouring === "change") return `${kind}${(of.counterpart?.at[at] ?? -1) < 0 ? "changed" : "same"}`;
  if (colouring === "logprob") {
    const logprob = of.logprobs?.[at];
    return logprob === undefined ? `${kind}unknown` : `${kind}p${stepOf(logprob)}`;
  }
  if (colouring === "version") {
    const version = versionAt(of.versions, at);
    return version === undefined ? `${kind}unknown` : `${kind}v${looks.get(version) ?? 0}`;
  }
  return kind.trim();
}

/** A token's text as it is shown between its neighbours. */
function spelled(of: Span, at: number): string {
  return visible(of.texts[at] ?? "", of.texts[at - 1], of.texts[at + 1]);
}

/** Versions get looks by their order, so that neighbours differ. */
function versionLooks(versions: readonly VersionRun[]): ReadonlyMap<bigint, number> {
  const sorted = [...new Set(versions.map((run) => run.version))].sort((a, b) => (a < b ? -1 : 1));
  return new Map(sorted.map((version, index) => [version, index % VERSION_LOOKS]));
}

/** A token's text on one line, in quotes, for its description. */
export function quotedToken(text: string): string {
  if (text === "") return "part of a character";
  return `“${visible(text).replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣")}”`;
}

/** The token that the character at `offset` of a run's text belongs to. */
export function tokenAt(of: Span, run: Run, offset: number): number {
  let at = run.start;
  let left = offset;
  while (at < run.end - 1) {
    const length = spelled(of, at).length;
    if (left < length) break;
    left -= length;
    at += 1;
  }
  return at;
}

/** Where a token's text lies in its run: [from, to). */
export function rangeOf(of: Span, run: Run, index: number): readonly [number, number] {
  let from = 0;
  for (let at = run.start; at < index; at += 1) from += spelled(of, at).length;
  return [from, from + spelled(of, index).length];
}

/** The next token from `index` on, in steps of `by`, that was less likely than one in two; -1 = none. */
export function nextSurprise(of: Span, index: number, by: 1 | -1): number {
  const { logprobs } = of;
  if (!logprobs) return -1;
  for (let at = index + by; at >= 0 && at < logprobs.length; at += by) {
    if ((logprobs[at] ?? 0) < -0.7) return at;
  }
  return -1;
}

/** Figures over a span's logprobs: of all of them, so an absent array has none. */
export function figures(logprobs: Float32Array | undefined): { mean: number; least: number; perplexity: number } | undefined {
  if (!logprobs || logprobs.length === 0) return undefined;
  let sum = 0;
  let least = 0;
  for (const logprob of logprobs) {
    sum += logprob;
    least = Math.min(least, logprob);
  }
  const mean = sum / logprobs.length;
  return { mean, least, perplexity: Math.exp(-mean) };
}

/** A token that both rollouts sampled: its logprobs on the left and on the right, and whether it follows the same tokens in both. */
export interface Agreement {
  readonly left: number;
  readonly right: number;
  readonly isSameContext: boolean;
}

/** What two rollouts say of a token; undefined = one of them does not have it, or has no logprob of it. */
export function agreement({ counterpart, logprobs }: Span, index: number): Agreement | undefined {
  const at = counterpart?.at[index] ?? -1;
  const [own, other] = [logprobs?.[index], counterpart?.logprobs?.[at]];
  if (!counterpart || own === undefined || other === undefined) return undefined;
  const isSameContext = index < counterpart.sameUntil;
  return counterpart.side === "left" ? { left: own, right: other, isSameContext } : { left: other, right: own, isSameContext };
}

/**
 * How many tokens of a span its counterpart has too, and by how much the logprobs changed, right minus left: the mean in nats over those
 * that follow the same tokens in both. Undefined = it has no counterpart.
 */
export function changeFigures(of: Span): { same: number; compared: number; mean: number } | undefined {
  if (!of.counterpart) return undefined;
  let [same, compared, sum] = [0, 0, 0];
  of.counterpart.at.forEach((at, index) => {
    if (at < 0) return;
    same += 1;
    const both = agreement(of, index);
    if (!both?.isSameContext) return;
    compared += 1;
    sum += both.right - both.left;
  });
  return { same, compared, mean: compared ? sum / compared : 0 };
}
