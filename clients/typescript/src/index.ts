/** Penstock for TypeScript: start rollouts of coding agents, answer their model calls, collect token-exact trajectories. */

export { Assays } from "./assays.js";
export { type AnswerOptions, ModelCall } from "./calls.js";
export { Completion, type CompletionOptions, type Sampling, type TopLogprobs } from "./completions.js";
export {
  type CreateGroupOptions,
  type CreateRolloutOptions,
  connect,
  type ExportOptions,
  type Groups,
  type Penstock,
  type RolloutFilter,
  type Rollouts,
  type WatchOptions,
} from "./connection.js";
export type { Agents, AgentSpec, CheckFinding } from "./driver/agents.js";
export type { RolloutChanges } from "./driver/changes.js";
export type { DeleteMetricsOptions, LogOptions, Metric, MetricPoint, MetricsOptions, Runs } from "./driver/runs.js";
export type { TerminalHandle, TerminalOptions, Terminals } from "./driver/terminals.js";
export type { TrajectoryOptions } from "./driver.js";
export { type ConnectOptions, DEFAULT_PORTS, type ServiceName, type Tls } from "./endpoints.js";
export * from "./errors.js";
export type { LeaseOptions } from "./gate/pulls.js";
export { type HostTool, type HostToolCall, type ToolContent, ToolContents, ToolFailed } from "./gate/tools.js";
export type {
  Abortable,
  BranchOptions,
  CallsOptions,
  GroupHandle,
  RegradeOptions,
  RolloutHandle,
  ServedCalls,
} from "./handles.js";
export type { Score, ScoreOptions, ToScore } from "./inference/scores.js";
export type { GenerateOptions, Inference, Prompt, Scored } from "./inference.js";
export type * from "./results.js";
export type { Service, UnaryOptions } from "./rpc.js";
export { VERSION } from "./runtime.js";
export type { Output, ProcessHandle } from "./sandboxes/processes.js";
export type { Diff, RunOptions, SandboxHandle, StartOptions } from "./sandboxes/sandbox.js";
export type { Fork, ForkOptions, SandboxSpec, Sandboxes } from "./sandboxes/sandboxes.js";
export type { InterceptSession, Selector, SessionOptions } from "./sessions.js";
export type {
  CallRule,
  Command,
  CommandOptions,
  Files,
  Reading,
  RolloutModel,
  RolloutOptions,
  Source,
  Task,
  Verifier,
} from "./tasks.js";
export type { Tensor, Tensors } from "./weights/safetensors.js";
export type { PauseMode, UpdateOptions, WeightOptions, WeightTransfer, WeightUpdate } from "./weights/weights.js";
