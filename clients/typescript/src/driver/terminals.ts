/** Terminal episodes: the policy itself types the commands, and its final answer is graded. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { type Driver, Patience, present } from "../driver.js";
import { Unavailable } from "../errors.js";
import {
  type StepRequestSchema,
  type StepResponse,
  type Terminal,
  TerminalService,
} from "../gen/penstock/driver/v1/terminal_service_pb.js";
import type { Abortable } from "../handles.js";
import type { Repeatable, Service } from "../rpc.js";
import { type Command, commandOf, type Task, taskOf } from "../tasks.js";
import { duration } from "../wire.js";
import type { Drivers } from "./drivers.js";

/** A task's first episode prepares the state that the others share. */
const OPEN_MS = 1_500_000;
const CLOSE_MS = 120_000;
/** An attempt to connect takes at most this long: a step that broke later had reached the driver. */
const CONNECT_MS = 25_000;

type Action = NonNullable<MessageInitShape<typeof StepRequestSchema>["action"]>;

export interface TerminalOptions extends Abortable {
  /** The operator's default where absent. */
  readonly backend?: string;
  readonly image?: string;
  /** Until the answer. Default 30 min. */
  readonly wallTimeMs?: number;
  /** For each command. Default 2 min. */
  readonly commandTimeoutMs?: number;
  /** Of each stream of an observation, half of it the end. Default 64 KiB, at most 1 MiB. */
  readonly outputLimitBytes?: number;
  /** Most commands. Default 240, the maximum. */
  readonly maxSteps?: number;
  readonly labels?: Readonly<Record<string, string>>;
}

/** One episode: `run`, `answer`, `refresh`, `close`. `await using` closes it. */
export class TerminalHandle {
  readonly #service: Service;
  readonly #client: Client<typeof TerminalService>;
  /** As it was last reported. */
  info: Terminal;

  constructor(service: Service, info: Terminal) {
    this.#service = service;
    this.#client = service.client(TerminalService);
    this.info = info;
  }

  get terminalId(): string {
    return this.info.terminalId;
  }

  /**
   * Runs one command in the episode's shell, whose working directory, variables and functions persist. It goes on where the
   * connection breaks, and the command is not run twice; when it is aborted the command runs on, and the next step waits for it.
   *
   * Rejects with FailedPrecondition EPISODE_ENDED; ResourceExhausted STEP_LIMIT, STEPS_PENDING; InvalidArgument STEP_INVALID.
   */
  async run(command: Command, { signal }: Abortable = {}): Promise<StepResponse> {
    return this.#step({ case: "command", value: commandOf(command) }, signal);
  }

  /**
   * Gives the final answer, at most 1 MiB, which ends the episode: its verifier runs and reads the text from a file. The
   * step has the reward; none = not graded, which is not zero. Rejects with FailedPrecondition EPISODE_ENDED.
   */
  async answer(text = "", { signal }: Abortable = {}): Promise<StepResponse> {
    return this.#step({ case: "finalAnswer", value: text }, signal);
  }

  /** The episode as it stands. */
  async refresh({ signal }: Abortable = {}): Promise<Terminal> {
    const { terminalId } = this;
    const answer = await this.#service.call((call) => this.#client.getTerminal({ terminalId }, call), {
      signal,
      repeatable: true,
    });
    this.info = present(answer.terminal);
    return this.info;
  }

  /** Ends it without an answer unless it has ended; fulfilled when its sandbox is removed. May be repeated. */
  async close({ signal }: Abortable = {}): Promise<void> {
    const { terminalId } = this;
    await this.#service.call((call) => this.#client.closeTerminal({ terminalId }, call), {
      signal,
      timeoutMs: CLOSE_MS,
      repeatable: true,
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  async #step(action: Action, signal?: AbortSignal): Promise<StepResponse> {
    const request: MessageInitShape<typeof StepRequestSchema> = {
      terminalId: this.terminalId,
      stepId: randomBytes(16).toString("hex"),
      action,
    };
    async function* requests() {
      yield request;
    }
    const patience = new Patience(this.#service);
    for (;;) {
      const begun = performance.now();
      try {
        return await this.#service.exchange((call) => this.#client.step(requests(), call), signal);
      } catch (error) {
        if (!(error instanceof Unavailable)) {
          throw error;
        }
        if (performance.now() - begun > CONNECT_MS) {
          patience.sign(); // the step may take longer than a driver that is down is waited for
        }
        await patience.pause(error, signal);
      }
    }
  }
}

/** `ps.terminals`. */
export class Terminals {
  readonly #drivers: Drivers;

  constructor(drivers: Drivers) {
    this.#drivers = drivers;
  }

  /**
   * Opens an episode at one of the drivers, without a network; fulfilled when it is ready for commands.
   *
   * Rejects with FailedPrecondition SETUP_FAILED (`output` in the metadata), CAPABILITY_MISSING; InvalidArgument
   * TERMINAL_INVALID; ResourceExhausted TERMINAL_LIMIT.
   */
  async open(task: Task, options: TerminalOptions = {}): Promise<TerminalHandle> {
    const { signal, backend = "", image = "", labels, outputLimitBytes, maxSteps } = options;
    const request = {
      requestId: randomBytes(16).toString("hex"),
      task: taskOf(task),
      wallTime: duration(options.wallTimeMs),
      commandTimeout: duration(options.commandTimeoutMs),
      labels: { ...labels },
      outputLimitBytes: outputLimitBytes === undefined ? undefined : BigInt(outputLimitBytes),
      maxSteps,
      ...((backend || image) && { sandbox: { backend, image } }),
    };
    const make = ({ service }: Driver, repeatable: true | "unlessDraining") => {
      const client = service.client(TerminalService);
      return service.call((call) => client.openTerminal(request, call), { signal, timeoutMs: OPEN_MS, repeatable });
    };
    const [{ service }, answer] = await this.#drivers.create("", make, signal);
    return new TerminalHandle(service, present(answer.terminal));
  }

  /** A handle of an episode that was opened elsewhere. Rejects with NotFound TERMINAL_UNKNOWN. */
  async attach(terminalId: string, { signal }: Abortable = {}): Promise<TerminalHandle> {
    const get = ({ service }: Driver, repeatable: Repeatable) => {
      const client = service.client(TerminalService);
      return service.call((call) => client.getTerminal({ terminalId }, call), { signal, repeatable });
    };
    const [{ service }, answer] = await this.#drivers.having(terminalId, get, signal);
    return new TerminalHandle(service, present(answer.terminal));
  }
}
