/**
 * A trainer's session over all gates: each gate's calls come in, and each result goes to the gate of its call.
 *
 * `gate/streams.ts` has the part at one gate. What a session has set (policy version, tools, a pause, credits) goes to all gates; one
 * that comes later or comes back gets it before its calls are handed out. The credits are shared out: a gate whose window is full
 * gets more while others do not use theirs.
 */

import { type ModelCall, unlessAborted } from "./calls.js";
import { type Cluster, FRESH_MS, isAway, type Member } from "./cluster.js";
import { type LogOptions, logMetrics } from "./driver/runs.js";
import {
  CallEnded,
  ConfigurationError,
  Internal,
  InvalidArgument,
  PenstockError,
  PermissionDenied,
  SessionLost,
  Unauthenticated,
} from "./errors.js";
import { extendLeases, type LeaseOptions, leaseCalls } from "./gate/pulls.js";
import { GateStream, type SelectorMessage, type Window } from "./gate/streams.js";
import { type HostTool, HostTools } from "./gate/tools.js";
import type { HostToolCall as HostToolCallMessage } from "./gen/penstock/interception/v1/intercept_service_pb.js";
import type { Abortable } from "./handles.js";
import { Inbox } from "./leases.js";
import { PAUSE_MS } from "./pauses.js";
import type { Service } from "./rpc.js";

const MAX_CREDITS = 2 ** 31 - 1;

/** Times of a session; tests shorten them. */
export const TIMES = {
  /** For how long calls wait for a gate of which the driver, too, says that it is lost: one that restarts keeps its calls. */
  goneMs: 30_000,
  /** How often the driver is asked for the gates while one is away. Else as often as its answer is not fresh any more. */
  lookAgainMs: 1000,
  freshMs: FRESH_MS,
};

/** Which rollouts' calls a session wants: those that match every condition that is set; none set = all. */
export interface Selector {
  readonly runId?: string;
  readonly groupId?: string;
  readonly rolloutIds?: readonly string[];
  readonly labels?: Readonly<Record<string, string>>;
  /** Of such rollouts, calls for these policies only, at most 64; absent or none = for any. */
  readonly policyIds?: readonly string[];
}

export interface SessionOptions extends Selector {
  /** Most calls leased and not answered at once, of all gates. Default 64. */
  readonly credits?: number;
  /** Most bytes of the same. Default 32 MiB. */
  readonly creditBytes?: number;
  /** The newest weights that the trainer has: of the only trained policy of each rollout. */
  readonly policyVersion?: number;
  /** The same by policy, where rollouts have several. */
  readonly policies?: Readonly<Record<string, number>>;
  /** Who this is, for people. Default: this machine's name. */
  readonly identity?: string;
  /** Whether calls carry messages and tools beside tokens. */
  readonly messages?: boolean;
  /** Whether they carry the agent's request body. */
  readonly bodies?: boolean;
  /** For how long a broken connection is taken up again. Default 5 min. */
  readonly reconnectTimeoutMs?: number;
  /** What a host tool threw and the agent does not read, with the call where there is one. Default: `console.error`. */
  readonly onToolError?: (error: unknown, call: HostToolCallMessage | undefined) => void;
}

/** A state that may be waited for. */
class Flag {
  #set: PromiseWithResolvers<void> | undefined;
  isSet = false;

  set(): void {
    this.isSet = true;
    this.#set?.resolve();
    this.#set = undefined;
  }

  clear(): void {
    this.isSet = false;
  }

  async wait(): Promise<void> {
    if (!this.isSet) {
      this.#set ??= Promise.withResolvers<void>();
      await this.#set.promise;
    }
  }
}

/** A gate and the session's part there. */
interface Place {
  member: Member;
  readonly stream: GateStream;
  /** Set while it answers neither this session nor the driver: nobody waits for it. */
  readonly unreachable: Flag;
  /** Since when its stream is broken. */
  awaySince: number | undefined;
}

interface Pause {
  readonly reason: string;
  readonly until: number;
}

/**
 * Made by `ps.intercept`; `calls()` gives what comes in, from every gate that the driver lists.
 *
 * A gate's connection that breaks is taken up again for `reconnectTimeoutMs`. A gate that is lost for half a minute is left: its calls
 * end with GATE_LOST, and the session goes on at the others. It fails when no gate can be reached, or on an error that will not
 * pass; then `calls()` and every answer under way reject.
 */
export class InterceptSession {
  readonly #siblings: Set<InterceptSession>;
  readonly #cluster: Cluster;
  readonly #given: Member;
  readonly #options: SessionOptions;
  readonly #selector: SelectorMessage;
  readonly #inbox = new Inbox();
  readonly #places = new Map<string, Place>();
  /** What is offered, for gates that come later. */
  readonly #offers = new HostTools(() => {});
  readonly #left = new AbortController();
  #window: Window;
  #policyVersion: number | undefined;
  readonly #policies: Map<string, number>;
  #pause: Pause | undefined;
  #sharers: readonly GateStream[] = [];
  #changes = 0;
  #changed = Promise.withResolvers<void>();
  #closing = false;
  #failure: PenstockError | undefined;
  #following: Promise<void> | undefined;

  private constructor(cluster: Cluster, given: Member, options: SessionOptions, siblings: Set<InterceptSession>) {
    const { credits = 64, creditBytes } = options;
    if (!Number.isInteger(credits) || credits < 1 || credits > MAX_CREDITS) {
      throw new InvalidArgument(`A session needs at least one credit, and at most ${MAX_CREDITS}`, { reason: "CREDITS" });
    }
    this.#cluster = cluster;
    this.#given = given;
    this.#options = options;
    this.#selector = selectorOf(options);
    this.#siblings = siblings;
    this.#window = { calls: credits, bytes: creditBytes === undefined ? undefined : BigInt(creditBytes) };
    this.#policyVersion = options.policyVersion;
    this.#policies = new Map(Object.entries(options.policies ?? {}));
  }

  /**
   * For the gate: opens a session, which is one of `siblings` until it ends; fulfilled when it stands.
   *
   * @param given the gate while no driver can be asked for all.
   */
  static async open(
    cluster: Cluster,
    given: Member,
    options: SessionOptions,
    siblings: Set<InterceptSession>,
    signal?: AbortSignal,
  ): Promise<InterceptSession> {
    signal?.throwIfAborted();
    const session = new InterceptSession(cluster, given, options, siblings);
    siblings.add(session);
    const opening = session.#open();
    try {
      await (signal === undefined ? opening : unlessAborted(opening, signal));
    } catch (error) {
      const closed = new SessionLost("The session was not opened", { reason: "SESSION_CLOSED" });
      session.#left.abort();
      session.#fail(closed);
      for (const { stream } of session.#places.values()) {
        stream.abandon(closed);
      }
      await opening.catch(() => {}); // `error` is what it ended with, or the signal's reason
      await session.close();
      throw error;
    }
    return session;
  }

  /** Of its first gate; changes when that did not take the old one up again. */
  get sessionId(): string {
    for (const { stream } of this.#places.values()) {
      if (stream.sessionId) {
        return stream.sessionId;
      }
    }
    return "";
  }

  /** Calls to answer, oldest first; ends when the session is closed or finished. Several loops may share it. */
  calls(options: { readonly signal?: AbortSignal } = {}): AsyncIterableIterator<ModelCall, undefined> {
    const iterator: AsyncIterableIterator<ModelCall, undefined> = {
      next: async () => {
        const call = await this.nextCall(options.signal);
        return call === undefined ? { done: true, value: undefined } : { done: false, value: call };
      },
      return: async () => ({ done: true, value: undefined }),
      [Symbol.asyncIterator]: () => iterator,
    };
    return iterator;
  }

  /** The next of `calls()`; undefined = there will be no more. */
  async nextCall(signal?: AbortSignal): Promise<ModelCall | undefined> {
    const call = await this.#inbox.nextCall(signal);
    if (call === undefined && this.#failure !== undefined && !this.#closing) {
      throw this.#failure;
    }
    return call;
  }

  /** Ends `calls()` once those that have come are handed out: nothing more is expected. */
  finish(): void {
    this.#inbox.finish();
  }

  /**
   * Informs all gates which weights of a policy are the newest: staleness bounds are judged against it.
   *
   * @param policyId absent = the only trained policy of each rollout.
   */
  announce(policyVersion: number, policyId = ""): void {
    BigInt(policyVersion); // throws RangeError
    if (policyId) {
      this.#policies.set(policyId, policyVersion);
    } else {
      this.#policyVersion = policyVersion;
    }
    for (const { stream } of this.#places.values()) {
      stream.announce(policyVersion, policyId);
    }
  }

  /** Replaces the window: at most so many calls (0 = none for now) leased and not answered; bytes as before if absent. */
  setCredits(calls: number, bytes?: number): void {
    if (!Number.isInteger(calls) || calls < 0 || calls > MAX_CREDITS) {
      throw new InvalidArgument(`Credits are whole, from 0 to ${MAX_CREDITS}`, { reason: "CREDITS" });
    }
    this.#window = { calls, bytes: bytes === undefined ? this.#window.bytes : BigInt(bytes) };
    this.#shareOut();
  }

  /**
   * Holds the calls of this selector at all gates, for every session and for the model source; agents see keep-alives. Fulfilled
   * when every gate that can be reached holds them.
   *
   * @param reason for the logs, for example "weight sync".
   * @param maxDurationMs after which calls flow again by themselves; absent = 10 min.
   * @returns calls that are leased or dispatched now; answers to them are still taken.
   */
  async pause(reason = "", maxDurationMs?: number): Promise<number> {
    this.#throwIfOver();
    this.#pause = { reason, until: performance.now() + (maxDurationMs ?? PAUSE_MS) };
    const open = await this.#everywhere(
      (stream, lost) => unlessAborted(stream.pauses.pause(reason, maxDurationMs), lost),
      (stream) => stream.pauses.beganWithoutIt(),
    );
    return open.reduce((sum, count) => sum + count, 0);
  }

  /** Lets calls flow again, at all gates. */
  async resume(): Promise<void> {
    this.#throwIfOver();
    this.#pause = undefined;
    await this.#everywhere((stream, lost) => unlessAborted(stream.pauses.resume(), lost));
  }

  /**
   * Offers tools to the agents of rollouts that are created from now on, in any mode; their calls run here until the session ends.
   * Fulfilled when every gate that can be reached has them.
   *
   * Rejects with InvalidArgument TOOL_NAME_RESERVED, TOOL_NOT_ALLOWED, FIELD_INVALID, HOST_TOOL; ResourceExhausted
   * TOOL_OFFER_LIMIT; Unavailable: a gate did not answer.
   *
   * @param tools in place of what was offered to the same selector before; none = withdraws it.
   * @param options `selector`: whose agents; absent = those whose calls the session wants.
   */
  async offerTools(tools: readonly HostTool[], options: Abortable & { readonly selector?: Selector } = {}): Promise<void> {
    this.#throwIfOver();
    const { signal } = options;
    // Tools are of rollouts, whichever policy calls them.
    const selector = selectorOf(options.selector ?? { ...this.#options, policyIds: [] });
    const undo = this.#offers.offer(tools, selector); // first: a gate that comes meanwhile has to get them
    try {
      await this.#everywhere(
        (stream, lost) => {
          const either = signal === undefined ? lost : AbortSignal.any([signal, lost]);
          return stream.offerTools(tools, selector, either);
        },
        (stream) => stream.adoptTools(tools, selector),
      );
    } catch (error) {
      undo();
      throw error;
    }
  }

  /**
   * Logs metrics of the session's run, such as the loss, for the dashboard; fulfilled once they are on the driver's disk. See `Runs.log`.
   *
   * Rejects with ConfigurationError RUN_NOT_SELECTED: the session is not of one `runId`.
   */
  async log(values: Readonly<Record<string, number>>, step: number, options: LogOptions = {}): Promise<void> {
    const { runId } = this.#options;
    if (!runId) {
      const message = "Metrics are those of a run: open the session with runId";
      throw new ConfigurationError(message, { reason: "RUN_NOT_SELECTED" });
    }
    await logMetrics(this.#cluster, runId, values, step, options);
  }

  /** Sends what is still to be sent and says goodbye: calls without an answer are queued again at once. */
  async close(): Promise<void> {
    this.#closing = true;
    this.#left.abort();
    this.#notify();
    await this.#following;
    await Promise.all([...this.#places.values()].map(({ stream }) => stream.close()));
    this.#fail(new SessionLost("The session is closed", { reason: "SESSION_CLOSED" }));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // The gates.

  async #open(): Promise<void> {
    await this.#look();
    this.#following = this.#follow();
    for (;;) {
      this.#throwIfOver();
      const places = [...this.#places.values()];
      const waits = places.some(({ stream, unreachable }) => !stream.isConnected && !unreachable.isSet);
      if (!waits && places.some(({ stream }) => stream.isConnected)) {
        return;
      }
      await this.#change(this.#changes);
    }
  }

  /** Does something at every gate; what those that can be reached give. The others get `later`. */
  async #everywhere<A>(
    act: (stream: GateStream, lost: AbortSignal) => Promise<A>,
    later: (stream: GateStream) => void = () => {},
  ): Promise<A[]> {
    // Begun at once at every gate, so that what is asked for later is later everywhere.
    const begun = [...this.#places.values()].map((place) => {
      const lost = new AbortController();
      const acting = act(place.stream, lost.signal).then((done) => ({ done }));
      acting.catch(() => {}); // the callers that wait get the error
      return { ...place, lost, acting };
    });
    const found = await Promise.all(
      begun.map(async ({ stream, unreachable, lost, acting }) => {
        try {
          const first = await Promise.race([acting, unreachable.wait()]);
          if (first !== undefined) {
            return [first.done];
          }
        } catch (error) {
          if (!stream.isAway || this.#failure !== undefined) {
            throw error;
          }
        }
        lost.abort();
        await acting.catch(() => {}); // it was cancelled
        later(stream);
        return [];
      }),
    );
    this.#throwIfOver();
    return found.flat();
  }

  /** Keeps the session at all gates, as the driver lists them, until it is closed or has failed. Never rejects. */
  async #follow(): Promise<void> {
    let lookAt = performance.now() + TIMES.lookAgainMs;
    try {
      while (this.#failure === undefined && !this.#closing) {
        const seen = this.#changes;
        this.#notice();
        for (const place of [...this.#places.values()]) {
          if (place.stream.failure !== undefined) {
            await this.#ended(place);
          }
        }
        const sharing = this.#sharing();
        if (sharing.length !== this.#sharers.length || sharing.some((stream, at) => stream !== this.#sharers[at])) {
          this.#shareOut();
        }
        if (performance.now() >= lookAt) {
          await this.#look();
          lookAt = performance.now() + TIMES.lookAgainMs;
        }
        await this.#change(seen, lookAt - performance.now());
      }
    } catch (error) {
      // Such as MEMBER_NOT_TRUSTED: without that gate the session would not be whole.
      this.#fail(
        error instanceof PenstockError
          ? error
          : new Internal(`The session failed: ${String(error)}`, { reason: "SESSION_FAILED", cause: error }),
      );
    }
  }

  /** Asks which gates there are; the session goes to new ones, and leaves lost ones. */
  async #look(): Promise<void> {
    let members: readonly Member[];
    try {
      const away = [...this.#places.values()].some(({ stream }) => !stream.isConnected);
      const ageMs = away ? TIMES.lookAgainMs : TIMES.freshMs;
      members = await this.#cluster.members("interception", { patient: false, ageMs, signal: this.#left.signal });
    } catch (error) {
      // A token that the driver refuses may be valid at the given gate.
      const notAsked = isAway(error) || error instanceof Unauthenticated || error instanceof PermissionDenied;
      if (this.#closing || (notAsked && this.#places.size > 0)) {
        return;
      }
      if (!notAsked) {
        throw error;
      }
      members = [this.#given];
    }
    const present = new Map(members.map((member) => [member.service.address, member]));
    for (const [address, member] of present) {
      const place = this.#places.get(address);
      if (place === undefined) {
        this.#add(member);
      } else {
        place.member = member;
      }
    }
    for (const [address, place] of [...this.#places]) {
      const stays = present.has(address);
      if (place.stream.isConnected || (stays && !place.member.isLost)) {
        continue;
      }
      place.unreachable.set();
      const waited = place.awaySince === undefined ? 0 : performance.now() - place.awaySince;
      if (!stays || (waited >= TIMES.goneMs && place.stream.sessionId)) {
        await this.#leave(place, stays);
      }
    }
    this.#notify();
  }

  /** Opens the session at one more gate, with the state that it has. */
  #add(member: Member, isLate = false): Place {
    const { identity, messages = false, bodies = false, reconnectTimeoutMs = 300_000, onToolError } = this.#options;
    const waits = isLate || (member.isLost && this.#places.size > 0);
    const options = {
      selector: this.#selector,
      window: this.#window,
      identity,
      policyVersion: this.#policyVersion,
      policies: this.#policies,
      messages,
      bodies,
      reconnectTimeoutMs: waits ? Number.POSITIVE_INFINITY : reconnectTimeoutMs,
      onToolError,
    };
    const stream = new GateStream(member.service, options, this.#inbox, {
      changed: () => this.#notify(),
      moved: () => this.#shareOutIfShort(),
    });
    for (const { selector, tools } of this.#offers.offers) {
      stream.adoptTools(tools, selector);
    }
    const left = this.#pause === undefined ? 0 : this.#pause.until - performance.now();
    if (this.#pause !== undefined && left > 0) {
      stream.pauses.adopt(this.#pause.reason, Math.max(left, 1000));
    }
    const place: Place = { member, stream, unreachable: new Flag(), awaySince: undefined };
    if (member.isLost) {
      place.unreachable.set();
    }
    this.#places.set(member.service.address, place);
    this.#shareOut();
    stream.start();
    return place;
  }

  /** Ends what a lost gate had. If it stays a member, the session waits for it without a limit. */
  async #leave({ member, stream }: Place, stays: boolean): Promise<void> {
    const name = member.name || member.service.address;
    await stream.lose(new CallEnded(`Gate ${name} is lost, and the call with it`, { reason: "GATE_LOST" }));
    this.#places.delete(member.service.address);
    if (stays && !this.#closing) {
      this.#add(member, true).unreachable.set();
    }
    this.#shareOut();
  }

  /** A gate's stream ended for good: without another gate that can be reached the session has failed. */
  async #ended(place: Place): Promise<void> {
    const { stream } = place;
    const others = [...this.#places.values()].some((other) => other !== place && other.stream.isConnected);
    if (stream.failure !== undefined && (!stream.isAway || !others)) {
      this.#fail(stream.failure);
    } else {
      await this.#leave(place, true);
    }
  }

  /** Notes which gates can be reached. */
  #notice(): void {
    const now = performance.now();
    const { reconnectTimeoutMs = 300_000 } = this.#options;
    const places = [...this.#places.values()];
    for (const place of places) {
      if (place.stream.isConnected) {
        place.awaySince = undefined;
        place.unreachable.clear();
        place.stream.reconnectTimeoutMs = reconnectTimeoutMs;
      } else {
        place.awaySince ??= now;
      }
    }
    if (places.length > 0 && !places.some(({ stream }) => stream.isConnected)) {
      const since = Math.max(...places.map(({ awaySince }) => awaySince ?? now));
      const endless = places.every(({ stream }) => stream.reconnectTimeoutMs === Number.POSITIVE_INFINITY);
      if (endless && now - since > reconnectTimeoutMs) {
        this.#fail(new SessionLost("No gate came back in time", { reason: "SESSION_LOST" }));
      }
    }
  }

  #notify(): void {
    this.#changes += 1;
    this.#changed.resolve();
    this.#changed = Promise.withResolvers<void>();
  }

  /** Waits until something has changed at a gate since there were `seen` changes, or the time has passed. */
  async #change(seen: number, timeoutMs?: number): Promise<void> {
    if (this.#changes !== seen) {
      return;
    }
    if (timeoutMs === undefined) {
      await this.#changed.promise;
      return;
    }
    const passed = Promise.withResolvers<void>();
    const timer = setTimeout(passed.resolve, Math.max(0, timeoutMs));
    await Promise.race([this.#changed.promise, passed.promise]);
    clearTimeout(timer);
  }

  // Credits.

  /** Shares the window out anew if a gate has used its part up while others have more than they use. */
  #shareOutIfShort(): void {
    const streams = this.#sharers;
    if (streams.length < 2 || this.#window.calls === 0) {
      return;
    }
    const isShort = streams.some(({ held, window }) => held >= window.calls);
    if (isShort && streams.some(({ held, window }) => window.calls - held >= 2)) {
      this.#shareOut();
    }
  }

  /** Gives each gate what it holds and an equal part of the rest, at least one call. */
  #shareOut(): void {
    const streams = this.#sharing();
    this.#sharers = streams;
    const { calls: total, bytes } = this.#window;
    const free = Math.max(0, total - streams.reduce((sum, { held }) => sum + held, 0));
    for (const [at, stream] of streams.entries()) {
      const part = Math.floor(free / streams.length) + (at < free % streams.length ? 1 : 0);
      const shared = total === 0 ? 0 : Math.max(1, stream.held + part);
      const calls = streams.length === 1 ? total : shared;
      const share = bytes === undefined || total === 0 ? bytes : (bytes * BigInt(calls)) / BigInt(total);
      stream.setWindow({ calls, bytes: share === 0n ? 1n : share });
    }
  }

  #sharing(): GateStream[] {
    return [...this.#places.values()]
      .filter(({ stream, unreachable }) => stream.isConnected || !unreachable.isSet)
      .map(({ stream }) => stream);
  }

  // The end.

  #throwIfOver(): void {
    if (this.#failure !== undefined) {
      throw this.#failure;
    }
  }

  /** Ends the session: everybody who waits gets `error`. */
  #fail(error: PenstockError): void {
    if (this.#failure === undefined) {
      this.#failure = error;
      this.#siblings.delete(this);
      for (const { stream } of this.#places.values()) {
        stream.fail(error);
      }
      this.#inbox.finish();
    }
    this.#notify();
  }
}

function selectorOf({ runId, groupId, rolloutIds = [], labels, policyIds = [] }: Selector) {
  return { runId, groupId, rolloutIds: [...rolloutIds], labels: { ...labels }, policyIds: [...policyIds] };
}

/** The gates' side of a connection: the sessions that are open, and calls without one. */
export class Gate {
  readonly #cluster: Cluster;
  readonly #given: Member;
  readonly #sessions = new Set<InterceptSession>();

  /** @param service the gate while no driver can be asked for all. */
  constructor(cluster: Cluster, service: Service) {
    this.#cluster = cluster;
    this.#given = { name: "", service, isLost: false, takesWork: true };
  }

  async open(options: SessionOptions, signal?: AbortSignal): Promise<InterceptSession> {
    return InterceptSession.open(this.#cluster, this.#given, options, this.#sessions, signal);
  }

  /** Calls without a session. */
  async lease(options: LeaseOptions & Selector): Promise<ModelCall[]> {
    return leaseCalls(await this.#services(options.signal), options);
  }

  /** Extends the leases of calls without a session. */
  async extend(calls: readonly ModelCall[], options: Abortable): Promise<ModelCall[]> {
    return extendLeases(calls, options);
  }

  /** Says goodbye in each. */
  async close(): Promise<void> {
    await Promise.all([...this.#sessions].map((session) => session.close()));
  }

  /** The gates that can be reached, as far as the driver knows. */
  async #services(signal: AbortSignal | undefined): Promise<Service[]> {
    let members: readonly Member[];
    try {
      members = await this.#cluster.members("interception", { patient: false, signal });
    } catch (error) {
      if (!(isAway(error) || error instanceof Unauthenticated || error instanceof PermissionDenied)) {
        throw error;
      }
      members = [this.#given];
    }
    const reachable = members.filter(({ isLost }) => !isLost);
    return (reachable.length > 0 ? reachable : members).map(({ service }) => service);
  }
}
