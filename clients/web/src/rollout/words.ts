/** The enums of the protos in words for people: one table for each; what this page does not know is shown by its number. */

import { FinishReason, Role } from "@gen/penstock/chat/v1/chat_pb";
import { AgentEventKind } from "@gen/penstock/driver/v1/agent_pb";
import { FailureCause, Party, Phase } from "@gen/penstock/driver/v1/rollout_pb";
import { Mode } from "@gen/penstock/interception/v1/interception_pb";
import { type Exit, ExitReason } from "@gen/penstock/sandbox/v1/process_service_pb";
import { Answerer, CallClass, CallState, CaptureLevel, Dialect, Grade } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { oneLine } from "./safe";

type Words = Readonly<Record<number, string>>;

const told = (words: Words, value: number): string => words[value] ?? `unknown (${value})`;

const PHASES: Words = {
  [Phase.UNSPECIFIED]: "unknown",
  [Phase.QUEUED]: "queued",
  [Phase.PREPARING]: "preparing",
  [Phase.CONFIGURING]: "configuring",
  [Phase.SETTING_UP]: "setting up",
  [Phase.RUNNING]: "running",
  [Phase.VERIFYING]: "verifying",
  [Phase.COLLECTING]: "collecting",
  [Phase.ENDED]: "ended",
};
export const phaseWord = (phase: Phase): string => told(PHASES, phase);

/** How a rollout stands that has not ended. */
export const standsWords = ({ phase, paused }: { readonly phase: Phase; readonly paused: boolean }): string => `${paused ? "paused, " : ""}${phaseWord(phase)}`;

const CAUSES: Words = {
  [FailureCause.UNSPECIFIED]: "It failed",
  [FailureCause.INFRASTRUCTURE]: "The infrastructure failed",
  [FailureCause.TASK]: "The task's setup failed",
  [FailureCause.AGENT]: "The agent failed",
  [FailureCause.TIMEOUT]: "The agent ran out of time",
  [FailureCause.BUDGET]: "A budget was used up",
  [FailureCause.VERIFIER]: "The verifier failed",
  [FailureCause.MODEL]: "The model did not answer",
  [FailureCause.CANCELLED]: "It was cancelled",
};
export const causeSentence = (cause: FailureCause): string => told(CAUSES, cause);

const PARTIES: Words = {
  [Party.AGENT]: "the agent, and the policy that drives it",
  [Party.TASK]: "the task's setup",
  [Party.VERIFIER]: "the verifier",
  [Party.SANDBOX]: "the sandbox or its provider",
  [Party.GATE]: "the interception service",
  [Party.ENGINE]: "the answerer of the model calls",
  [Party.OPERATOR]: "a person's decision: a cancellation, a stopped service or the group's policy",
  [Party.BUDGET]: "a limit of model calls",
  [Party.DRIVER]: "the driver",
};
/** Empty where an older driver does not say. */
export const partyWords = (party: Party): string => (party === Party.UNSPECIFIED ? "" : told(PARTIES, party));

/** What a failure means for training, in a sentence. */
export function trainingSentence(cause: FailureCause): string {
  switch (cause) {
    case FailureCause.INFRASTRUCTURE:
    case FailureCause.MODEL:
      return "It says nothing about the policy: keep it out of baselines.";
    case FailureCause.TASK:
      return "No agent ran: the task is to be mended.";
    case FailureCause.AGENT:
    case FailureCause.TIMEOUT:
    case FailureCause.BUDGET:
      return "It is the policy's doing and may be graded.";
    case FailureCause.VERIFIER:
      return "No reward can be trusted: the verifier is to be mended.";
    default:
      return "";
  }
}

const MODES: Words = {
  [Mode.UNSPECIFIED]: "",
  [Mode.BLACK_BOX]: "black box",
  [Mode.TRANSPARENT_PROXY]: "transparent proxy",
  [Mode.INTERCEPTION_GATE]: "interception gate",
};
export const modeWord = (mode: Mode): string => told(MODES, mode);

const CLASSES: Words = {
  [CallClass.UNSPECIFIED]: "call",
  [CallClass.MAIN]: "main",
  [CallClass.SUB_AGENT]: "sub-agent",
  [CallClass.COMPACTION]: "compaction",
  [CallClass.TITLE]: "title",
  [CallClass.PROBE]: "probe",
  [CallClass.EDIT]: "edited history",
  [CallClass.RETRY]: "retry",
  [CallClass.JUDGE]: "judge",
};
export const classWord = (value: CallClass): string => told(CLASSES, value);

const CLASS_SENTENCES: Words = {
  [CallClass.MAIN]: "The agent's main conversation.",
  [CallClass.SUB_AGENT]: "A conversation that the agent opened beside its main one.",
  [CallClass.COMPACTION]: "A history that the agent itself shortened or summarised.",
  [CallClass.TITLE]: "A title, a topic or a summary for a user interface.",
  [CallClass.PROBE]: "A check that the model can be reached.",
  [CallClass.EDIT]: "A history that the agent edited in place.",
  [CallClass.RETRY]: "The same messages asked again; the agent went on with another answer.",
  [CallClass.JUDGE]: "A verifier's question to its judge, after the agent's end.",
};
export const classSentence = (value: CallClass): string => CLASS_SENTENCES[value] ?? "";

const STATES: Words = {
  [CallState.UNSPECIFIED]: "unknown",
  [CallState.QUEUED]: "waits for an answerer",
  [CallState.LEASED]: "the trainer has it",
  [CallState.DELIVERED]: "answered",
  [CallState.FAILED]: "failed",
  [CallState.CANCELLED]: "cancelled",
  [CallState.EXPIRED]: "expired: no answer in time",
  [CallState.DISPATCHED]: "the model is answering",
};
export const callStateWord = (state: CallState): string => told(STATES, state);

const ANSWERERS: Words = {
  [Answerer.UNSPECIFIED]: "",
  [Answerer.TRAINER]: "trainer",
  [Answerer.INFERENCE]: "inference service",
  [Answerer.UPSTREAM]: "upstream",
};
export const answererWord = (answerer: Answerer): string => told(ANSWERERS, answerer);

const FINISHES: Words = {
  [FinishReason.UNSPECIFIED]: "",
  [FinishReason.STOP]: "stop",
  [FinishReason.LENGTH]: "cut: length",
  [FinishReason.TOOL_CALLS]: "tool calls",
  [FinishReason.ABORT]: "aborted",
  [FinishReason.CONTENT_FILTER]: "withheld by a filter",
};
export const finishWord = (finish: FinishReason): string => told(FINISHES, finish);

const DIALECTS: Words = {
  [Dialect.UNSPECIFIED]: "",
  [Dialect.CHAT_COMPLETIONS]: "Chat Completions",
  [Dialect.RESPONSES]: "Responses",
  [Dialect.MESSAGES]: "Messages",
  [Dialect.GENERATE_CONTENT]: "generateContent",
};
export const dialectWord = (dialect: Dialect): string => told(DIALECTS, dialect);

const LEVELS: Words = {
  [CaptureLevel.UNSPECIFIED]: "unknown",
  [CaptureLevel.NONE]: "nothing but that calls happened",
  [CaptureLevel.TEXT]: "messages, no tokens",
  [CaptureLevel.TOKENS]: "exact tokens, no logprobs",
  [CaptureLevel.TOKENS_AND_LOGPROBS]: "exact tokens and logprobs",
};
export const captureWords = (level: CaptureLevel): string => told(LEVELS, level);

const GRADES: Words = {
  [Grade.UNSPECIFIED]: "not graded",
  [Grade.EXACT]: "exact",
  [Grade.USABLE]: "usable",
  [Grade.UNUSABLE]: "unusable",
};
export const gradeWord = (grade: Grade): string => told(GRADES, grade);

const ROLES: Words = {
  [Role.UNSPECIFIED]: "message",
  [Role.SYSTEM]: "system",
  [Role.DEVELOPER]: "developer",
  [Role.USER]: "user",
  [Role.ASSISTANT]: "assistant",
  [Role.TOOL]: "tool",
};
export const roleWord = (role: Role): string => told(ROLES, role);

const UNTRAINED: Readonly<Record<string, string>> = {
  SHARED: "trained in another sample of this rollout",
  PARENT: "not trained: the rollout of which this one is a branch trains it",
  TRUNCATED: "not trained: a limit cut it",
  BUDGET: "not trained: a budget cut it",
  INJECTED: "not trained: the trainer showed the agent another text than the tokens spell",
  NO_LOGPROBS: "not trained: it has no logprobs",
  PARTIAL: "not trained: only a part of it is in the history that went on",
  UNUSABLE: "not trained: its tokens cannot be used",
};

/** Why a turn's tokens are masked; empty = they are trained. */
export function untrainedWords(reason: string): string {
  if (reason === "") return "";
  const known = UNTRAINED[reason];
  if (known !== undefined) return known;
  const name = /^CLASS_(.*)$/u.exec(reason)?.[1];
  return name === undefined ? `not trained: ${oneLine(reason)}` : `not trained: ${name.toLowerCase().replaceAll("_", "-")} calls are context`;
}

/** How a process ended. */
export function exitWords(exit: Exit | undefined): string {
  if (!exit) return "did not run";
  const because = exit.message === "" ? "" : `: ${oneLine(exit.message, 200)}`;
  switch (exit.reason) {
    case ExitReason.EXITED:
      return `exit ${exit.status.case === "code" ? exit.status.value : "?"}`;
    case ExitReason.SIGNALED:
      return `signal ${exit.status.case === "signal" ? exit.status.value : "?"}`;
    case ExitReason.TIMED_OUT:
      return "timed out";
    case ExitReason.KILLED:
      return "killed";
    case ExitReason.OOM:
      return "killed for memory";
    case ExitReason.SANDBOX_LOST:
      return "lost with its sandbox";
    case ExitReason.START_FAILED:
      return `could not be started${because}`;
    default:
      return `ended${because}`;
  }
}

/** It ended by itself, with 0. */
export const exitOk = (exit: Exit | undefined): boolean =>
  exit?.reason === ExitReason.EXITED && exit.status.case === "code" && exit.status.value === 0;

const EVENTS: Words = {
  [AgentEventKind.ASSISTANT]: "says",
  [AgentEventKind.REASONING]: "thinks",
  [AgentEventKind.TOOL_CALL]: "calls",
  [AgentEventKind.TOOL_RESULT]: "got",
  [AgentEventKind.ERROR]: "error",
  [AgentEventKind.DONE]: "done",
  [AgentEventKind.OTHER]: "line",
};
export const agentEventWord = (kind: AgentEventKind): string => EVENTS[kind] ?? "line";

/** 0.0421 s as "42 ms", 4.21 s as "4.2 s", 252 s as "4 min 12 s". */
export function durationWords(seconds: number): string {
  if (!Number.isFinite(seconds) || seconds < 0) return "";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** 1 call, 2 calls. */
export const counted = (count: number | bigint, one: string, many = `${one}s`): string =>
  `${count.toLocaleString("en")} ${Number(count) === 1 ? one : many}`;

/** A number with as many digits as say something. */
export const figure = (value: number): string => (Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "?");
