/**
 * Host tools: functions of this program that agents call through the gate, and the calls that run.
 *
 * A call runs once, however often the gate sends it; its result stays until the gate has it on disk. What a tool throws goes to
 * `onToolError`; the agent reads no more of it than the message of a `ToolFailed`.
 */

import type { JsonObject, MessageInitShape } from "@bufbuild/protobuf";
import { create, toBinary } from "@bufbuild/protobuf";
import { InvalidArgument } from "../errors.js";
import type { ToolSchema } from "../gen/penstock/chat/v1/chat_pb.js";
import {
  type CallSelectorSchema,
  type HostToolCall as HostToolCallMessage,
  type HostToolResult,
  HostToolResultSchema,
  ResultRejected_Reason as Reason,
  type ToolResultsAcknowledged,
} from "../gen/penstock/interception/v1/intercept_service_pb.js";

const FRAME_BYTES = 8 * 1024 * 1024;

type Selector = MessageInitShape<typeof CallSelectorSchema>;
type ToolMessage = MessageInitShape<typeof ToolSchema>;

/** One call of a tool by an agent. */
export interface HostToolCall {
  /** Never used for another call. */
  readonly toolCallId: string;
  readonly name: string;
  /** They satisfy the tool's schema. */
  readonly arguments: JsonObject;
  readonly rolloutId: string;
  /** Aborted when nobody needs the result any more. */
  readonly signal: AbortSignal;
  /** As it travelled: group, run, task, labels, when it times out for the agent. */
  readonly message: HostToolCallMessage;
}

/** One part of a result. */
export type ToolContent =
  | { readonly type: "text"; readonly text: string }
  | { readonly type: "image"; readonly data: Uint8Array; readonly mediaType: string };

/** A result that has parts. */
export class ToolContents {
  constructor(readonly parts: readonly ToolContent[]) {}
}

/** A tool that agents of rollouts may call. */
export interface HostTool {
  /** A letter, then letters, digits, _ and -, 48 at most; none that agents have themselves, as `bash`. */
  readonly name: string;
  /** For the model. */
  readonly description?: string;
  /** JSON Schema of the arguments; absent = any object. The gate refuses invalid arguments before they come here. */
  readonly parameters?: JsonObject;
  /** Gives the agent's result: a text, `ToolContents`, or any JSON value. Throws `ToolFailed` with a message for the agent. */
  readonly run: (call: HostToolCall) => unknown;
}

/** Thrown by a tool: its message is what the agent reads. */
export class ToolFailed extends Error {
  override readonly name = "ToolFailed";
}

/** Tools, and whose agents are offered them. */
export interface Offer {
  readonly selector: Selector;
  readonly tools: readonly HostTool[];
}

/** The tools of one session. */
export class HostTools {
  readonly #wake: () => void;
  readonly #report: (error: unknown, call: HostToolCallMessage | undefined) => void;
  readonly #offers = new Map<string, Offer>();
  /** Selectors of withdrawn offers that the gate may still have. */
  readonly #withdrawn = new Map<string, Selector>();
  readonly #running = new Map<string, AbortController>();
  readonly #results = new Map<string, HostToolResult>();
  readonly #unsent = new Set<string>();
  #over = false;

  /** @param wake called whenever there is something to send. */
  constructor(wake: () => void, report?: (error: unknown, call: HostToolCallMessage | undefined) => void) {
    this.#wake = wake;
    this.#report = report ?? ((error, call) => console.error(`host tool ${call?.name ?? ""} failed:`, error));
  }

  /** Serves the tools from now on. @returns what takes them back. Throws InvalidArgument HOST_TOOL. */
  offer(tools: readonly HostTool[], selector: Selector): () => void {
    const key = keyOf(selector);
    for (const [other, offer] of this.#offers) {
      for (const tool of offer.tools) {
        const mine = tools.find(({ name }) => name === tool.name);
        if (other !== key && mine !== undefined && mine !== tool) {
          throw new InvalidArgument(`This session has another tool ${tool.name}`, { reason: "HOST_TOOL" });
        }
      }
    }
    const before = this.#offers.get(key);
    const set = (offer: Offer | undefined) => {
      this.#offers.delete(key);
      if (offer !== undefined && offer.tools.length > 0) {
        this.#offers.set(key, offer);
      }
    };
    set({ selector, tools });
    return () => set(before);
  }

  /** What is offered now. */
  get offers(): readonly Offer[] {
    return [...this.#offers.values()];
  }

  /** Notes that the offer to a selector was withdrawn, and that the gate does not know it yet. */
  withdrawn(selector: Selector): void {
    this.#withdrawn.set(keyOf(selector), selector);
  }

  /** What a stream has to register; withdrawals first, as a gate limits the selectors. */
  get registrations(): { readonly selector: Selector; readonly tools: readonly ToolMessage[] }[] {
    const withdrawn = [...this.#withdrawn].filter(([key]) => !this.#offers.has(key));
    return [
      ...withdrawn.map(([, selector]) => ({ selector, tools: [] })),
      ...[...this.#offers.values()].map(({ selector, tools }) => ({ selector, tools: tools.map(toolMessage) })),
    ];
  }

  /** The gate has these tools in place of what it had. */
  registered(selector: Selector, tools: readonly unknown[]): void {
    const key = keyOf(selector);
    if (tools.length === 0 || this.#offers.has(key)) {
      this.#withdrawn.delete(key); // else they were withdrawn meanwhile
    }
  }

  /** A call from the gate, which may be a repeat. */
  called(message: HostToolCallMessage): void {
    const { toolCallId } = message;
    if (this.#results.has(toolCallId)) {
      this.#send(toolCallId);
    } else if (!this.#running.has(toolCallId) && !this.#over) {
      const abort = new AbortController();
      this.#running.set(toolCallId, abort);
      void this.#run(message, abort.signal); // it never rejects
    }
  }

  /** Calls that need no result any more. */
  cancelled(toolCallIds: readonly string[]): void {
    for (const toolCallId of toolCallIds) {
      this.#forget(toolCallId);
      this.#running.get(toolCallId)?.abort();
      this.#running.delete(toolCallId);
    }
  }

  /** Results that the gate has on disk, or refused; then the agent is given an error of the tool. */
  acknowledged(frame: ToolResultsAcknowledged): void {
    for (const toolCallId of frame.acceptedToolCallIds) {
      this.#forget(toolCallId);
    }
    for (const { callId, reason, message, violations } of frame.rejected) {
      const result = this.#results.get(callId);
      this.#forget(callId);
      if (reason !== Reason.INVALID || result === undefined) {
        continue; // the call is over
      }
      this.#report(new InvalidArgument(violations.join("; ") || message, { reason: "INVALID" }), undefined);
      if (!(result.isError && result.result?.["text"] === FAILED)) {
        this.#finish(callId, { text: FAILED }, true);
      }
    }
  }

  /** A new stream stands: what was not acknowledged is sent again. A gate that forgot the session has no calls of it. */
  takenUp(resumed: boolean): void {
    if (!resumed) {
      this.#withdrawn.clear(); // the gate has nothing of the old session
      this.#results.clear();
      this.cancelled([...this.#running.keys()]);
    }
    this.#unsent.clear();
    for (const toolCallId of this.#results.keys()) {
      this.#send(toolCallId);
    }
  }

  /** What is to be sent, up to a limit in bytes; undefined = nothing. */
  next(): { readonly results: HostToolResult[] } | undefined {
    const results: HostToolResult[] = [];
    let size = 0;
    for (const toolCallId of this.#unsent) {
      const result = this.#results.get(toolCallId);
      size += result === undefined ? 0 : toBinary(HostToolResultSchema, result).length;
      if (results.length > 0 && size > FRAME_BYTES) {
        break;
      }
      this.#unsent.delete(toolCallId);
      if (result !== undefined) {
        results.push(result);
      }
    }
    return results.length > 0 ? { results } : undefined;
  }

  /** Calls that run are aborted: nobody needs them. */
  end(): void {
    this.#over = true;
    this.cancelled([...this.#running.keys()]);
  }

  async #run(message: HostToolCallMessage, signal: AbortSignal): Promise<void> {
    const { toolCallId, name, rolloutId } = message;
    let result: JsonObject = { text: FAILED };
    let isError = true;
    try {
      const tool = [...this.#offers.values()].flatMap(({ tools }) => tools).find((item) => item.name === name);
      if (tool === undefined) {
        throw new ToolFailed("The tool is no longer available.");
      }
      const given = JSON.parse(message.argumentsJson) as JsonObject;
      result = fieldsOf(await tool.run({ toolCallId, name, arguments: given, rolloutId, signal, message }));
      isError = false;
    } catch (error) {
      if (error instanceof ToolFailed) {
        result = { text: error.message || FAILED };
      } else if (!signal.aborted) {
        this.#report(error, message);
      }
    }
    if (!signal.aborted) {
      this.#running.delete(toolCallId);
      this.#finish(toolCallId, result, isError);
    }
  }

  #finish(toolCallId: string, result: JsonObject, isError: boolean): void {
    this.#results.set(toolCallId, create(HostToolResultSchema, { toolCallId, result, isError }));
    this.#send(toolCallId);
  }

  #send(toolCallId: string): void {
    this.#unsent.add(toolCallId);
    this.#wake();
  }

  #forget(toolCallId: string): void {
    this.#unsent.delete(toolCallId);
    this.#results.delete(toolCallId);
  }
}

const FAILED = "The tool failed.";

/** A tool as it is registered. Throws InvalidArgument HOST_TOOL: its schema is no JSON. */
export function toolMessage({ name, description = "", parameters }: HostTool): ToolMessage {
  try {
    return { name, description, parametersJsonSchema: parameters === undefined ? "" : JSON.stringify(parameters) };
  } catch (error) {
    throw new InvalidArgument(`The schema of tool ${name} is not JSON`, { reason: "HOST_TOOL", cause: error });
  }
}

function keyOf({ runId, groupId, rolloutIds = [], labels = {} }: Selector): string {
  const sorted = Object.entries(labels as Record<string, string>).sort(([one], [other]) => (one < other ? -1 : 1));
  return JSON.stringify([runId ?? null, groupId ?? null, rolloutIds, sorted]);
}

/** A tool's result as the gate takes it. Throws TypeError, RangeError: what would change on the way. */
function fieldsOf(given: unknown): JsonObject {
  if (given === undefined || given === null || typeof given === "string") {
    return { text: (given ?? "").toWellFormed() };
  }
  if (given instanceof ToolContents) {
    const blocks = given.parts.map((part) =>
      part.type === "text"
        ? { type: "text", text: part.text.toWellFormed() }
        : { type: "image", data: Buffer.from(part.data).toString("base64"), mimeType: part.mediaType },
    );
    return { content: blocks };
  }
  const text = JSON.stringify(given, (_, value: unknown) => {
    if (typeof value === "number" && (!Number.isFinite(value) || (Number.isInteger(value) && Math.abs(value) > 2 ** 53))) {
      throw new RangeError("a number cannot be sent exactly: return it as text");
    }
    return value;
  });
  if (text === undefined) {
    throw new TypeError("a tool's result is no JSON value");
  }
  const value = JSON.parse(text) as JsonObject;
  return typeof value === "object" && !Array.isArray(value) ? value : { result: value };
}
