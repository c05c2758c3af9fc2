/** Why a rollout's reward is what it is, in sentences. Nothing is reckoned anew: it is what the driver recorded, said. */

import { GradingPlace, type Outcome, Phase, type Verifier } from "@gen/penstock/driver/v1/rollout_pb";
import { trainingSentence, counted, figure } from "./words";
import { byteCount } from "./safe";

/** A named part of a reward, with its range where one was declared. */
export interface Component {
  readonly name: string;
  readonly value: number;
  readonly range: string;
}

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
