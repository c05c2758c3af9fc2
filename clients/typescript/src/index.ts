/** Penstock for TypeScript: start rollouts of coding agents, answer their model calls, collect token-exact trajectories. */

export { type AnswerOptions, ModelCall } from "./calls.js";
export { Completion, type CompletionOptions, type Sampling, type TopLogprobs } from "./completions.js";
export {
  type CreateGroupOptions,
  type CreateRolloutOptions,
  connect,
  type Groups,
  type Penstock,
  type RolloutFilter,
  type Rollouts,
} from "./connection.js";
export type { TrajectoryOptions } from "./driver.js";
export { type ConnectOptions, DEFAULT_PORTS, type ServiceName, type Tls } from "./endpoints.js";
export * from "./errors.js";
export type { Abortable, CallsOptions, GroupHandle, RolloutHandle, ServedCalls } from "./handles.js";
export type { GenerateOptions, Inference, Prompt } from "./inference.js";
export type * from "./results.js";
export type { Service, UnaryOptions } from "./rpc.js";
export type { InterceptSession, Selector, SessionOptions } from "./sessions.js";
export type { Command, CommandOptions, Files, Reading, RolloutOptions, Source, Task, Verifier } from "./tasks.js";
