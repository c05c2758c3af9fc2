/**
 * A rollout as a page follows it: how it stands, its events, and its calls as they come.
 *
 * Invariants: an event is taken once and in order, whatever streams break in between; at most one reading of the capture is
 * under way, and one more is made when calls ended meanwhile; what was read of an attempt that failed is never shown as the
 * next one's; nothing is written after `stop`.
 */

import { batch, computed, type ReadonlySignal, signal } from "@preact/signals";
import { Code } from "@connectrpc/connect";
import { Phase, type Rollout, type RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import { RolloutGateService } from "@gen/penstock/interception/v1/rollout_gate_service_pb";
import { explain, isCancelled, type Trouble } from "../lib/errors";
import { type Following, follow } from "../lib/follow";
import { findAt, gateOf, remember } from "../lib/members";
import { client } from "../lib/transport";
import { type Capture, captureSoFar, NO_CAPTURE, NoVocabulary, trajectory, vocabulary } from "./records";
import { conversationTree, type TreeBranch } from "./tree";
import { type Vocabulary, VocabularyError } from "./vocabulary";

/** Events that are kept in the page; older ones are counted. Those that make up the timeline are kept always. */
export const MAX_EVENTS = 5_000;

export interface RolloutModel {
  readonly id: string;
  readonly rollout: ReadonlySignal<Rollout | undefined>;
  readonly events: ReadonlySignal<readonly RolloutEvent[]>;
  readonly droppedEvents: ReadonlySignal<number>;
  readonly capture: ReadonlySignal<Capture>;
  readonly captureTrouble: ReadonlySignal<Trouble | undefined>;
  /** The calls were read at least once, or there are none to read. */
  readonly isCaptureRead: ReadonlySignal<boolean>;
  readonly tree: ReadonlySignal<readonly TreeBranch[]>;
  readonly vocabulary: ReadonlySignal<Vocabulary | undefined>;
  /** Why token texts cannot be shown; empty = they can, or will be. */
  readonly vocabularyNote: ReadonlySignal<string>;
  /** There is no such rollout (any more). */
  readonly isUnknown: ReadonlySignal<boolean>;
  readonly following: Following;
  retryCapture(): void;
  stop(): void;
}

/** Follows a rollout until `stop`. */
export function followRollout(id: string): RolloutModel {
  const abort = new AbortController();
  const rollout = signal<Rollout | undefined>(undefined);
  const events = signal<readonly RolloutEvent[]>([]);
  const droppedEvents = signal(0);
  const capture = signal<Capture>(NO_CAPTURE);
  const captureTrouble = signal<Trouble | undefined>(undefined);
  const isCaptureRead = signal(false);
  const words = signal<Vocabulary | undefined>(undefined);
  const vocabularyNote = signal("");
  const tree = computed(() => conversationTree(capture.value.calls, capture.value.branches, capture.value.samples));
  let lastSequence = 0n;
  let waiting: RolloutEvent[] = [];
  let isReading = false;
  let isDirty = false;
  /** Raised with each attempt that failed: what was asked for before belongs to nobody. */
  let generation = 0;
  /** An attempt failed, and the gate is not open for the next one: what it has is that of the last. */
  let isBetween = false;
  let askedFor = "";

  const following = follow(
    "follow this rollout",
    async function* (signal) {
      // Asked first: an unknown rollout is reported at once, and the header is there before the events.
      const driver = await read(signal);
      followCalls();
      if (lastSequence === 0n) void readCapture();
      yield* client(RolloutService, driver).watchRollout({ rolloutId: id, afterSequence: lastSequence }, { signal, timeoutMs: 0 });
    },
    ({ message }) => {
      if (message.case !== "event" || message.value.sequence <= lastSequence) return;
      lastSequence = message.value.sequence;
      if (waiting.length === 0) setTimeout(flush, FLUSH_MS); // many events are one rendering
      waiting.push(message.value);
    },
    false,
  );

  /** Reads how the rollout stands; gives the name of its driver. */
  function read(signal: AbortSignal): Promise<string> {
    return findAt(id, async (driver) => {
      const answer = await client(RolloutService, driver).getRollout({ rolloutId: id }, { signal });
      remember(id, answer.rollout?.home, driver);
      rollout.value = answer.rollout;
      return driver;
    });
  }

  /** While an agent may ask: each change of a call, so that one that waits is seen to wait. */
  let calls: Following | undefined;
  function followCalls(): void {
    const phase = rollout.peek()?.phase;
    if (phase === Phase.RUNNING && !calls) {
      calls = follow(
        "follow the calls of this rollout",
        (signal) => client(RolloutGateService, gateOf(id)).watchCalls({ rolloutIds: [id] }, { signal, timeoutMs: 0 }),
        ({ event }) => {
          if (event.case === "changed" || event.case === "started") void readCapture();
        },
        false,
      );
    } else if (phase !== Phase.RUNNING) {
      calls?.stop();
      calls = undefined;
    }
  }

  function flush(): void {
    const fresh = waiting;
    waiting = [];
    if (abort.signal.aborted) return;
    const all = [...events.peek(), ...fresh];
    const left = kept(all, MAX_EVENTS);
    batch(() => {
      droppedEvents.value += left.dropped;
      events.value = left.events;
    });
    const cases = new Set(fresh.map((event) => event.event.case));
    for (const event of fresh) isBetween = event.event.case === "attemptFailed" || (isBetween && !isOfOpenGate(event));
    if (cases.has("attemptFailed")) {
      generation += 1;
      capture.value = NO_CAPTURE;
      captureTrouble.value = undefined;
    }
    if (CHANGES.some((name) => cases.has(name))) void readRollout();
    else if (cases.has("callFinished")) void readCapture(); // also where the gate's own stream is broken
  }

  async function readRollout(): Promise<void> {
    try {
      await read(abort.signal);
      followCalls();
    } catch (error) {
      if (!isCancelled(error)) following.retry(); // the stream reports it in words
    }
    await readCapture();
  }

  async function readCapture(): Promise<void> {
    if (isReading) {
      isDirty = true;
      return;
    }
    isReading = true;
    let asked = generation;
    try {
      do {
        isDirty = false;
        asked = generation;
        if (isBetween) break; // read when the gate is open
        const isEnded = rollout.peek()?.phase === Phase.ENDED;
        if (isEnded && capture.peek().isWhole) break;
        const known = capture.peek();
        const read = isEnded ? await trajectory(id, abort.signal) : await captureSoFar(id, known, abort.signal);
        if (asked !== generation) {
          isDirty = true;
          continue;
        }
        capture.value = read;
        captureTrouble.value = undefined;
        void readVocabulary();
      } while (isDirty);
    } catch (error) {
      if (!abort.signal.aborted && asked === generation) captureTrouble.value = absent(error, rollout.peek());
    } finally {
      isReading = false;
      isCaptureRead.value = true;
    }
    if (!abort.signal.aborted && asked !== generation) await readCapture(); // that of a failed attempt broke: the next one's is read
  }

  async function readVocabulary(): Promise<void> {
    const digest = capture.peek().tokenizerSha256;
    const key = digest.join(",");
    if (digest.length === 0 || key === askedFor) return;
    askedFor = key;
    try {
      words.value = await vocabulary(digest);
      vocabularyNote.value = "";
    } catch (error) {
      askedFor = ""; // the next reading asks again
      vocabularyNote.value = vocabularyWords(error);
    }
  }

  return {
    id,
    rollout,
    events,
    droppedEvents,
    capture,
    captureTrouble,
    isCaptureRead,
    tree,
    vocabulary: words,
    vocabularyNote,
    isUnknown: computed(() => {
      const health = following.health.value;
      return health.kind === "broken" && health.trouble.code === Code.NotFound;
    }),
    following,
    retryCapture: () => void readCapture(),
    stop() {
      abort.abort();
      following.stop();
      calls?.stop();
    },
  };
}

/** The events after which the rollout itself stands differently. */
const CHANGES = ["phaseChanged", "paused", "resumed", "ended"] as const;

/** The time of a frame, but also in a tab that nobody sees. */
const FLUSH_MS = 16;

/** Whether the gate of an attempt has been opened when this happens. */
function isOfOpenGate({ event }: RolloutEvent): boolean {
  return event.case === "ended" || (event.case === "phaseChanged" && !CLOSED_PHASES.has(event.value.phase));
}
const CLOSED_PHASES: ReadonlySet<Phase> = new Set([Phase.UNSPECIFIED, Phase.QUEUED, Phase.PREPARING, Phase.SETTING_UP]);

/** The newest `most` events and all older ones of the timeline, and how many of `all` are not among them. */
export function kept(all: readonly RolloutEvent[], most: number): { readonly events: readonly RolloutEvent[]; readonly dropped: number } {
  const over = Math.max(0, all.length - most);
  if (over === 0) return { events: all, dropped: 0 };
  const events = [...all.slice(0, over).filter(isOfTimeline), ...all.slice(over)];
  return { events, dropped: all.length - events.length };
}

function isOfTimeline(event: RolloutEvent): boolean {
  return event.event.case === "phaseChanged" || event.event.case === "attemptFailed";
}

/** That there is no capture is no trouble before the gate was opened, or where it never was. */
function absent(error: unknown, rollout: Rollout | undefined): Trouble | undefined {
  const trouble = explain(error, "read the calls of this rollout");
  if (trouble.reason === "TRAJECTORY_ABSENT") return undefined;
  if (trouble.code === Code.NotFound && rollout?.phase !== Phase.ENDED) return undefined;
  return trouble;
}

function vocabularyWords(error: unknown): string {
  if (error instanceof NoVocabulary || error instanceof VocabularyError) return error.message;
  const trouble = explain(error, "read the model's tokenizer");
  return `${trouble.title}: tokens are shown by their ids. ${trouble.todo}`.trim();
}
