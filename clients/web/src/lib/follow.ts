// A stream that is taken up again for as long as somebody looks.
//
// Invariants: one attempt at a time; nothing is delivered after `stop`; a break is shown once, in words, and the time between
// attempts grows to a cap with jitter; a new token begins anew at once; silence is a break, for every stream. A tab that nobody
// looks at lets go of its stream after a while: a browser has six connections for all tabs of one address, and the services have
// better things to do.
import { Code, ConnectError } from "@connectrpc/connect";
import { signal, type ReadonlySignal } from "@preact/signals";

import { explain, type Trouble } from "./errors";
import { token } from "./session";

export type Health =
  | { readonly kind: "connecting" }
  | { readonly kind: "live" }
  | { readonly kind: "ended" }
  | {
      readonly kind: "broken";
      readonly trouble: Trouble;
      readonly retryAt: number;
      /** When something came last; null = never. */
      readonly heardAt: number | null;
    };

export interface Following {
  readonly health: ReadonlySignal<Health>;
  /** Asks again now. */
  retry(): void;
  stop(): void;
}

const FIRST_MS = 400;
const CAP_MS = 10_000;
const LASTING_CAP_MS = 30_000;
const HIDDEN_MS = 15_000;
/** Every stream that is followed has a message or a heartbeat at least each 10 s: without any for this long there is nobody. */
export const SILENCE_MS = 30_000;

/** Milliseconds until the next attempt: doubled each time up to the cap, drawn from the upper half. */
export function delay(attempt: number, lasting: boolean, random: () => number = Math.random): number {
  const ceiling = Math.min(lasting ? LASTING_CAP_MS : CAP_MS, (lasting ? 5_000 : FIRST_MS) * 2 ** Math.min(attempt, 16));
  return ceiling * (0.5 + random() / 2);
}

/** The answer of a unary call as a stream of one message, for `follow` to ask again until it comes. */
export async function* once<M>(answer: Promise<M>): AsyncGenerator<M> {
  yield await answer;
}

/**
 * Follows a server stream.
 *
 * @param what as for `explain`: "watch the rollouts".
 * @param open makes one attempt; it is asked anew after a break and resumes by what it has seen.
 * @param onMessage gets each message, in order.
 * @param again whether a stream that ended well is opened again; false = it is over (a rollout that has ended).
 * @param heardBefore when what is shown already was received; null = nothing is shown yet.
 */
export function follow<M>(
  what: string,
  open: (abort: AbortSignal) => AsyncIterable<M>,
  onMessage: (message: M) => void,
  again = true,
  heardBefore: number | null = null,
): Following {
  const health = signal<Health>({ kind: "connecting" });
  let stopped = false;
  let attempt = 0;
  let current = new AbortController();
  let wake: () => void = () => {};
  let resting = false;
  let heardAt = heardBefore;
  let hiding: ReturnType<typeof setTimeout> | undefined;

  const pause = (ms: number) =>
    new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });

  /** Returns when somebody looks. */
  const looked = () =>
    new Promise<void>((resolve) => {
      wake = resolve;
    });

  async function run(): Promise<void> {
    while (!stopped) {
      if (resting) {
        await looked();
        continue;
      }
      const abort = new AbortController();
      current = abort;
      let silent: ConnectError | null = null;
      let silence: ReturnType<typeof setTimeout> | undefined;
      const listen = () => {
        clearTimeout(silence);
        silence = setTimeout(() => {
          silent = new ConnectError(`Nothing came for ${SILENCE_MS / 1000} s.`, Code.DeadlineExceeded);
          abort.abort(silent);
        }, SILENCE_MS);
      };
      let broken: { trouble: Trouble; wait: number } | null = null;
      try {
        listen();
        for await (const message of open(abort.signal)) {
          if (stopped) return;
          listen();
          attempt = 0;
          heardAt = Date.now();
          if (health.peek().kind !== "live") health.value = { kind: "live" };
          onMessage(message);
        }
        if (!again) {
          health.value = { kind: "ended" };
          return;
        }
      } catch (error) {
        if (stopped) return;
        if (abort.signal.aborted && !silent) continue;
        const trouble = explain(silent ?? error, what, true);
        broken = { trouble, wait: Math.max(delay(attempt, trouble.lasting), (trouble.retryAfter ?? 0) * 1000) };
      } finally {
        clearTimeout(silence);
      }
      if (stopped) return;
      const wait = broken?.wait ?? delay(attempt, false);
      attempt += 1;
      health.value = broken
        ? { kind: "broken", trouble: broken.trouble, retryAt: Date.now() + wait, heardAt }
        : { kind: "connecting" };
      await pause(wait);
    }
  }

  function retry(): void {
    attempt = 0;
    current.abort();
    wake();
  }

  function onVisibility(): void {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => {
        resting = true;
        current.abort();
      }, HIDDEN_MS);
    } else if (resting) {
      resting = false;
      retry();
    }
  }

  let seen = token.peek();
  const forget = token.subscribe((value) => {
    if (value === seen) return;
    seen = value;
    health.value = { kind: "connecting" };
    retry();
  });
  window.addEventListener("online", retry);
  document.addEventListener("visibilitychange", onVisibility);
  void run();
  return {
    health,
    retry,
    stop() {
      stopped = true;
      forget();
      clearTimeout(hiding);
      window.removeEventListener("online", retry);
      document.removeEventListener("visibilitychange", onVisibility);
      current.abort();
      wake();
    },
  };
}
