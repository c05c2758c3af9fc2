/** A call's completion as a page shows it: its tokens, and the parts that they spell. */

import type { Call } from "@gen/penstock/trajectory/v1/trajectory_pb";
import type { SaidPart } from "./bodies";
import { type Segment, segments, type Sought } from "./segments";
import { float32, int32, type Span, span } from "./tokens";
import type { Vocabulary } from "./vocabulary";

/** The sampled tokens of a call; undefined = the record has none. */
export function spanOf(call: Call, vocabulary: Vocabulary | undefined, untrained: string | undefined): Span | undefined {
  const sampled = call.completion?.span;
  if (!sampled || sampled.tokenIds.length === 0) return undefined;
  const versions = sampled.versions.map(({ policyVersion, start, end }) => ({ version: policyVersion, start, end }));
  const logprobs = sampled.logprobs.length > 0 ? float32(sampled.logprobs) : undefined;
  return span(int32(sampled.tokenIds), logprobs, versions, vocabulary, untrained);
}

/** The parts of the message that the agent was shown. */
export function partsOf(call: Call): SaidPart[] {
  return (call.completion?.message?.parts ?? []).map(({ part }): SaidPart => {
    switch (part.case) {
      case "text":
        return { kind: "text", text: part.value.text, name: "" };
      case "reasoning":
        return { kind: "reasoning", text: part.value.text, name: "" };
      case "toolCall":
        return { kind: "tool_call", text: part.value.argumentsJson, name: part.value.name };
      case "image":
        return { kind: "image", text: "", name: part.value.mediaType };
      default:
        return { kind: "other", text: "", name: "" };
    }
  });
}

/** Which tokens are which part. */
export function segmentsOf(span: Span, parts: readonly SaidPart[]): Segment[] {
  const sought = parts.map(
    (part): Sought => ({
      kind: part.kind === "reasoning" || part.kind === "tool_call" ? part.kind : "text",
      text: part.text,
      name: part.name,
    }),
  );
  return segments(span.texts, sought);
}

/** The policy versions that sampled a call, ascending. */
export function versionsOf(call: Call): bigint[] {
  const found = new Set((call.completion?.span?.versions ?? []).map((run) => run.policyVersion));
  return [...found].sort((a, b) => (a < b ? -1 : 1));
}

/** "v3", or "v3–v5" where several sampled. */
export function versionWords(versions: readonly bigint[]): string {
  const [first] = versions;
  const last = versions.at(-1);
  if (first === undefined || last === undefined) return "";
  return first === last ? `v${first}` : `v${first}–v${last}`;
}
