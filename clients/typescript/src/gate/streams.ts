/**
 * A session's part at one gate: calls in, results out, over one stream that is taken up again when it breaks.
 *
 * What is held and what is under way is in `leases.ts`, what is asked of the flow of calls in `pauses.ts`, one stream in
 * `conversations.ts`. Frames carry what is ready and never wait to fill. Something is sent at least every half heartbeat
 * interval; a gate that is silent for three is taken for gone. `sessions.ts` has the session over all gates.
 */

import { hostname } from "node:os";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { Conversation, type Frame, type Party, Wake } from "../conversations.js";
import {
  Aborted,
  Cancelled,
  DeadlineExceeded,
  Internal,
  isBroken,
  PenstockError,
  SessionLost,
  Unavailable,
} from "../errors.js";
import {
  type CallSelectorSchema,
  type HostToolCall as HostToolCallMessage,
  type InterceptResponse,
  InterceptService,
  type ModelCall as ModelCallMessage,
  type Welcome,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";
import { type Inbox, Leases } from "../leases.js";
import { Pauses } from "../pauses.js";
import { Prompts } from "../prompts.js";
import { Backoff, MAX_MESSAGE_BYTES, pause, type Service } from "../rpc.js";
import { milliseconds } from "../wire.js";
import { type HostTool, HostTools, toolMessage } from "./tools.js";

const GOODBYE_MS = 5000;
const SETTLED_MS = 5000;

/** Most calls, and most bytes of them, leased and not answered at once. */
export interface Window {
  readonly calls: number;
  readonly bytes: bigint | undefined;
}

export type SelectorMessage = MessageInitShape<typeof CallSelectorSchema>;

/** What the first Hello of a stream says. */
export interface StreamOptions {
  readonly selector: SelectorMessage;
  readonly window: Window;
  readonly identity: string | undefined;
  readonly policyVersion: number | undefined;
  /** The newest version by policy; copied. */
  readonly policies: ReadonlyMap<string, number>;
  readonly messages: boolean;
  readonly bodies: boolean;
  /** For how long the gate is waited for, at first and when the stream broke. */
  readonly reconnectTimeoutMs: number;
  readonly onToolError: ((error: unknown, call: HostToolCallMessage | undefined) => void) | undefined;
}

/** What a stream reports to its session. */
export interface Listener {
  /** `isConnected` or `failure` changed. */
  changed(): void;
  /** Frames came that may change `held`. */
  moved(): void;
}

/** A session at one gate. `start` connects, `close` ends it; `failure` is set once it has failed for good. */
export class GateStream {
  readonly service: Service;
  readonly pauses = new Pauses((frame) => this.#send(frame));
  reconnectTimeoutMs: number;
  /** Changes when the gate did not take the old session up again. */
  sessionId = "";
  isConnected = false;
  failure: PenstockError | undefined;
  /** Whether `failure` is that the gate did not come back in time. */
  isAway = false;
  readonly #client: Client<typeof InterceptService>;
  readonly #options: StreamOptions;
  readonly #listener: Listener;
  readonly #wake = new Wake();
  readonly #leases: Leases;
  readonly #tools: HostTools;
  readonly #prompts: Prompts;
  /** Aborted by `close`: there is no next stream. */
  readonly #closed = new AbortController();
  /** Aborted where the stream is not waited for any more. */
  readonly #ended = new AbortController();
  #window: Window;
  #policyVersion: number | undefined;
  readonly #policies: Map<string, number>;
  #outbox: Frame[] = [];
  #hasUnregistered = false;
  #goAway: PenstockError | undefined;
  #closing = false;
  #lastReceived = performance.now();
  #running: Promise<void> | undefined;
  readonly #party: Party = {
    hello: () => this.#hello(),
    welcomed: (welcome) => this.#takeUp(welcome),
    heard: () => {
      this.#lastReceived = performance.now();
    },
    received: (frame) => this.#received(frame),
    next: () => this.#nextFrame(),
    leaves: () => this.#closing,
  };

  /** @param inbox gets the calls. */
  constructor(service: Service, options: StreamOptions, inbox: Inbox, listener: Listener) {
    this.service = service;
    this.reconnectTimeoutMs = options.reconnectTimeoutMs;
    this.#client = service.client(InterceptService);
    this.#options = options;
    this.#listener = listener;
    this.#leases = new Leases(this.#wake.set, inbox);
    this.#tools = new HostTools(this.#wake.set, options.onToolError);
    this.#prompts = new Prompts(service, this.#client);
    this.#window = options.window;
    this.#policyVersion = options.policyVersion;
    this.#policies = new Map(options.policies);
  }

  /** Begins to connect. */
  start(): void {
    this.#running = this.#run();
  }

  /** How many calls are leased from here and not answered. */
  get held(): number {
    return this.#leases.size;
  }

  get window(): Window {
    return this.#window;
  }

  /** Replaces the window. */
  setWindow(window: Window): void {
    if (window.calls !== this.#window.calls || window.bytes !== this.#window.bytes) {
      this.#window = window;
      this.#send({ case: "credits", value: window });
    }
  }

  /** Informs the gate which weights of a policy are the newest; empty = of the only trained one of each rollout. */
  announce(policyVersion: number, policyId: string): void {
    if (policyId) {
      this.#policies.set(policyId, policyVersion);
    } else {
      this.#policyVersion = policyVersion;
    }
    this.#send({ case: "policy", value: { policyVersion: BigInt(policyVersion), policyId } });
  }

  /** Offers tools to the agents of rollouts that are created from now on. */
  async offerTools(tools: readonly HostTool[], selector: SelectorMessage, signal?: AbortSignal): Promise<void> {
    if (this.failure !== undefined) {
      throw this.failure;
    }
    const request = { sessionId: this.sessionId, selector, tools: tools.map(toolMessage) };
    const undo = this.#tools.offer(tools, selector); // first: a call may come before the answer
    try {
      await this.service.call((call) => this.#client.registerTools(request, call), { signal, repeatable: true });
    } catch (error) {
      undo();
      throw error;
    }
    this.#tools.registered(selector, tools);
  }

  /** Tools that are offered, or withdrawn, with the next stream, before any call of it is handed out. */
  adoptTools(tools: readonly HostTool[], selector: SelectorMessage): void {
    this.#tools.offer(tools, selector);
    if (tools.length === 0 && this.sessionId) {
      this.#tools.withdrawn(selector); // a session that is resumed keeps them
    }
    this.#hasUnregistered = true;
  }

  /** Sends what is still to be sent and says goodbye: calls without an answer are queued again at once. */
  async close(): Promise<void> {
    const closed = new SessionLost("The session is closed", { reason: "SESSION_CLOSED" });
    this.#closing = true;
    this.#closed.abort(closed);
    this.#wake.set();
    // A gate that does not answer will notice by our silence that we are gone.
    const timer = setTimeout(() => this.abandon(closed), GOODBYE_MS);
    await this.#running;
    clearTimeout(timer);
    this.#end(closed);
  }

  /** Ends the session here without a word to the gate: every waiter gets `error`. */
  async lose(error: PenstockError): Promise<void> {
    this.isAway = true;
    this.#end(error);
    this.abandon(error);
    await this.#running;
  }

  /** Ends the stream, or the wait for the next one, at once. */
  abandon(error: PenstockError): void {
    this.#closing = true;
    this.#closed.abort(error);
    this.#ended.abort(error);
    this.#wake.set();
  }

  /** Ends the session here: every waiter gets `error`. */
  fail(error: PenstockError): void {
    this.#end(error);
    this.abandon(error);
  }

  #send(frame: Frame): void {
    this.#outbox.push(frame);
    this.#wake.set();
  }

  /** Connects, converses, and connects again until the session is closed or cannot be saved. Never rejects. */
  async #run(): Promise<void> {
    const backoff = new Backoff();
    this.#lastReceived = performance.now();
    try {
      for (;;) {
        const began = performance.now();
        try {
          await new Conversation(this.service, this.#client, this.#party, this.#wake).run(this.#ended.signal);
          return;
        } catch (error) {
          this.#disconnected();
          if (this.#closing || this.#ended.signal.aborted || !passes(error)) {
            throw error;
          }
          if (!this.sessionId && !(error instanceof Unavailable)) {
            throw error;
          }
          if (performance.now() - began > SETTLED_MS) {
            backoff.reset();
          }
          const wish = this.#goAway ?? error;
          this.#goAway = undefined;
          if (performance.now() - this.#lastReceived > this.reconnectTimeoutMs) {
            this.isAway = true;
            if (!this.sessionId) {
              throw error;
            }
            const seconds = Math.round(this.reconnectTimeoutMs / 1000);
            throw new SessionLost(`The session could not be resumed in ${seconds} s: ${error.message}`, {
              reason: "SESSION_LOST",
              cause: error,
            });
          }
          await pause(backoff.next(wish), this.#closed.signal);
        }
      }
    } catch (error) {
      this.#end(
        error instanceof PenstockError
          ? error
          : new Internal(`The gate's message could not be read: ${String(error)}`, {
              reason: "PROTOCOL",
              cause: error,
            }),
      );
    } finally {
      this.#disconnected();
    }
  }

  #disconnected(): void {
    if (this.isConnected) {
      this.isConnected = false;
      this.#listener.changed();
    }
  }

  /** What the session wants now. The outbox begins anew with it: what is queued from here on goes out after Welcome. */
  #hello(): Frame {
    this.#outbox = this.#window.calls === 0 ? [{ case: "credits", value: this.#window }] : [];
    this.#outbox.push(...this.pauses.unanswered);
    const { identity, messages, bodies, selector } = this.#options;
    return {
      case: "hello",
      value: {
        selector,
        // None for now is said by a frame of its own, after Welcome.
        credits: { ...this.#window, calls: Math.max(1, this.#window.calls) },
        identity: identity || hostname(),
        policyVersion: this.#policyVersion === undefined ? undefined : BigInt(this.#policyVersion),
        policies: [...this.#policies].map(([policyId, version]) => ({ policyId, policyVersion: BigInt(version) })),
        view: { messages, body: bodies, suffixOnly: true },
        maxMessageBytes: BigInt(MAX_MESSAGE_BYTES),
        ...(this.sessionId && { resumeSessionId: this.sessionId, held: { callIds: this.#leases.callIds } }),
      },
    };
  }

  /** After Welcome: calls that were lost end, what is unanswered is sent again. */
  async #takeUp({ sessionId, resumed, heldCallIds }: Welcome): Promise<void> {
    this.sessionId = sessionId;
    this.#leases.takenUp(resumed ? new Set(heldCallIds) : undefined);
    this.#tools.takenUp(resumed);
    this.#prompts.clear();
    this.pauses.beganStream();
    this.#hasUnregistered ||= !resumed;
    while (this.#hasUnregistered) {
      await this.#register(); // more may be adopted meanwhile
    }
    this.isConnected = true;
    this.#listener.changed();
  }

  /** Sends the gate which tools are offered and which are not any more. */
  async #register(): Promise<void> {
    const { sessionId } = this;
    this.#hasUnregistered = false;
    try {
      for (const { selector, tools } of this.#tools.registrations) {
        const request = { sessionId, selector, tools: [...tools] };
        await this.service.call((call) => this.#client.registerTools(request, call));
        this.#tools.registered(selector, tools);
      }
    } catch (error) {
      this.#hasUnregistered = true; // the next stream does it
      throw error;
    }
  }

  #nextFrame(): Frame | undefined {
    const frame = this.#outbox.shift();
    if (frame !== undefined) {
      return frame;
    }
    const results = this.#leases.nextResults();
    if (results !== undefined) {
      return { case: "results", value: results };
    }
    const toolResults = this.#tools.next();
    return toolResults === undefined ? undefined : { case: "toolResults", value: toolResults };
  }

  async #received(frame: InterceptResponse["frame"]): Promise<void> {
    if (frame.case === "calls") {
      await this.#prompts.completed(frame.value.calls, (call) => this.#leased(call));
    } else {
      this.#receive(frame);
    }
    this.#listener.moved();
  }

  #leased(call: ModelCallMessage): void {
    if (this.pauses.isUnconfirmed && !this.#leases.has(call.callId)) {
      // Leased before this gate knew of the pause.
      const { callId, rolloutId, leaseId } = call;
      const result = { callId, rolloutId, leaseId, result: { case: "release" as const, value: {} } };
      this.#send({ case: "results", value: { results: [result] } });
    } else {
      this.#leases.leased(call);
    }
  }

  #receive(frame: InterceptResponse["frame"]): void {
    switch (frame.case) {
      case "acknowledged":
        for (const callId of frame.value.acceptedCallIds) {
          this.#leases.accepted(callId);
        }
        for (const rejected of frame.value.rejected) {
          this.#leases.rejected(rejected);
        }
        break;
      case "cancelled":
        for (const callId of frame.value.callIds) {
          this.#leases.cancelled(callId, frame.value.reason || "CANCELLED");
        }
        break;
      case "rolloutsClosed":
        this.#leases.closed(new Set(frame.value.rolloutIds));
        this.#prompts.forget(frame.value.rolloutIds);
        break;
      case "toolCalls":
        for (const call of frame.value.calls) {
          this.#tools.called(call);
        }
        break;
      case "toolCallsCancelled":
        this.#tools.cancelled(frame.value.toolCallIds);
        break;
      case "toolResultsAcknowledged":
        this.#tools.acknowledged(frame.value);
        break;
      case "paused":
        this.pauses.paused(frame.value.openCalls);
        break;
      case "resumed":
        this.pauses.resumed();
        break;
      case "goAway": {
        const { reason, retryAfter } = frame.value;
        this.#goAway = new Unavailable(reason, { reason: "GO_AWAY", retryAfterMs: milliseconds(retryAfter) });
        break;
      }
      default: // heartbeats, and what a newer gate may say
    }
  }

  /** Nothing comes or goes any more: every waiter gets the error. */
  #end(error: PenstockError): void {
    if (this.failure !== undefined) {
      return;
    }
    this.failure = error;
    this.isConnected = false;
    this.pauses.end(error);
    this.#leases.end(error);
    this.#tools.end();
    this.#listener.changed();
  }
}

/** Whether connecting again may help: the transport broke, or the gate restarts or lost our heartbeats. */
function passes(error: unknown): error is PenstockError {
  if (error instanceof Aborted) {
    return false; // another process took the session over
  }
  if (isBroken(error) || error instanceof Cancelled || error instanceof DeadlineExceeded) {
    return true;
  }
  return error instanceof Internal && error.reason.startsWith("TRANSPORT_");
}
