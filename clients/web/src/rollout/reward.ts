/** Why a rollout's reward is what it is, in sentences. Nothing is reckoned anew: it is what the driver recorded, said. */

import { GradingPlace, type Outcome, Phase, type Verifier } from "@gen/penstock/driver/v1/rollout_pb";
import type { Annotation, Call } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { trainingSentence, counted, figure } from "./words";
import { byteCount } from "./safe";

/** A named part of a reward, with its range where one was declared. */
export interface Component {
  readonly name: string;
  readonly value: number;
  readonly range: string;
}

/** What the verifier gave to one turn, or what a judge outside says of a turn or of the whole rollout. */
export interface Judgement {
  /** The call's index; undefined = the whole rollout, or a call that was not read. */
  readonly turn: number | undefined;
  /** Empty = it is the verifier's own reward. */
  readonly name: string;
  readonly author: string;
  readonly value: number | undefined;
  /** "style 0.5", "12 tokens", or both. */
  readonly more: string;
  /** As JSON; empty = nothing. */
  readonly details: string;
}

/** Judgements that are shown; a trajectory may have 1,024 of each kind. */
export const MOST_JUDGEMENTS = 200;

export interface Explanation {
  /** "0.75", or what stands there without a reward. */
  readonly headline: string;
  /** Where in its range the reward lies, 0 to 1; undefined = not graded. */
  readonly share: number | undefined;
  readonly sentences: readonly string[];
  readonly components: readonly Component[];
}

/** Explains an outcome; undefined while there is none. */
export function explainReward(
  outcome: Outcome | undefined,
  verifier: Verifier | undefined,
  phase: Phase,
): Explanation {
  if (!outcome) {
    const sentence = verifier
      ? phase === Phase.VERIFYING
        ? "The verifier is at work."
        : "It is graded when the agent is done and dead."
      : "The task has no verifier: it will not be graded.";
    return { headline: "–", share: undefined, sentences: [sentence], components: [] };
  }
  const { reward, grading, failure } = outcome;
  const sentences: string[] = [];
  if (reward) {
    sentences.push(...made(outcome, verifier));
  } else if (!verifier) {
    sentences.push("Not graded, which is not zero: the task has no verifier.");
  } else if (failure) {
    sentences.push(
      grading
        ? "Not graded, which is not zero: the verifier started but returned no valid reward."
        : "Not graded, which is not zero: the rollout failed in a way after which nothing is graded.",
    );
    const meaning = trainingSentence(failure.cause);
    if (meaning !== "") sentences.push(meaning);
  } else {
    sentences.push("Not graded, which is not zero.");
  }
  if (grading) sentences.push(...how(outcome, verifier));
  const width = reward ? reward.rangeMax - reward.rangeMin : 0;
  return {
    headline: reward ? figure(reward.value) : "–",
    share: reward ? (width > 0 ? (reward.value - reward.rangeMin) / width : 1) : undefined,
    sentences,
    components: components(outcome, verifier),
  };
}

/** The verifier's rewards of turns, then what judges outside say, each in its order; the first MOST_JUDGEMENTS, and how many there are. */
export function judgements(
  outcome: Outcome | undefined,
  annotations: readonly Annotation[],
  calls: readonly Call[],
): { readonly shown: readonly Judgement[]; readonly whole: number } {
  const indices = new Map(calls.map((call) => [call.callId, call.index]));
  const turns = outcome?.reward?.turns ?? [];
  const given = turns.slice(0, MOST_JUDGEMENTS).map((turn) => ({
    turn: indices.get(turn.callId),
    name: "",
    author: "verifier",
    value: turn.value,
    more: [...Object.entries(turn.components).map(([name, value]) => `${name} ${figure(value)}`), ...tokensOf(turn.tokenValues)].join(", "),
    details: "",
  }));
  const said = annotations.slice(0, MOST_JUDGEMENTS - given.length).map((one) => ({
    turn: one.callId === undefined ? undefined : indices.get(one.callId),
    name: one.name,
    author: one.author,
    value: one.value,
    more: tokensOf(one.tokenValues).join(", "),
    details: one.details && Object.keys(one.details).length > 0 ? JSON.stringify(one.details, null, 2) : "",
  }));
  return { shown: [...given, ...said], whole: turns.length + annotations.length };
}

function tokensOf(values: Uint8Array): string[] {
  return values.length > 0 ? [counted(values.length / 4, "token")] : [];
}

function made(outcome: Outcome, verifier: Verifier | undefined): string[] {
  const { reward, grading, failure } = outcome;
  if (!reward) return [];
  const range = `${figure(reward.rangeMin)} to ${figure(reward.rangeMax)}`;
  const sentences: string[] = [];
  if (verifier?.reward.case === "rewardFile") {
    sentences.push(`The verifier's commands wrote ${figure(reward.value)}, within their range of ${range}.`);
  } else if (grading) {
    sentences.push(
      `${grading.passed} of ${counted(grading.total, "verifier command")} passed: that share of the range ${range} is ${figure(reward.value)}.`,
    );
  } else {
    sentences.push(`${figure(reward.value)} in a range of ${range}.`);
  }
  if (failure) sentences.push("The rollout failed by the policy's own doing and was graded all the same.");
  return sentences;
}

function how(outcome: Outcome, verifier: Verifier | undefined): string[] {
  const { grading } = outcome;
  if (!grading) return [];
  const sentences: string[] = [];
  if (grading.place === GradingPlace.FRESH_FORK) {
    sentences.push("Graded in a fresh fork of the prepared state, with the agent's changes brought over.");
    const { changes } = grading;
    if (changes) {
      sentences.push(
        `Brought over: ${counted(changes.entries, "path")} (${byteCount(Number(changes.sizeBytes))})` +
          `${changes.removed > 0 ? `, ${changes.removed} removed` : ""}` +
          `${changes.leftOut > 0 ? `; left out: ${changes.leftOut}` : ""}.`,
      );
    }
  } else if (grading.place === GradingPlace.AGENT_SANDBOX) {
    sentences.push("Graded in the agent's own sandbox, after everything that it started was dead.");
  }
  const patterns = verifier?.restore.length ?? 0;
  if (grading.restored > 0) {
    sentences.push(`Before that ${counted(grading.restored, "path")} were put back as they had been prepared.`);
  } else if (patterns > 0) {
    sentences.push("Nothing had to be put back: no path matched what is to be restored.");
  }
  return sentences;
}

function components(outcome: Outcome, verifier: Verifier | undefined): Component[] {
  return Object.entries(outcome.reward?.components ?? {})
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, value]) => {
      const range = verifier?.componentRanges[name];
      return { name, value, range: range ? `${figure(range.min)} to ${figure(range.max)}` : "" };
    });
}
