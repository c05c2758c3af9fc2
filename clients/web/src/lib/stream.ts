// A stream as long as a component is shown: its newest message, and how it is.
import { type Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { follow, type Following } from "./follow";

export interface Streamed<M> {
  /** The newest message; null until the first. */
  readonly message: Signal<M | null>;
  readonly following: Signal<Following | null>;
}

/**
 * Follows a stream of samples, each of which replaces the one before.
 *
 * @param what as for `follow`.
 * @param open one attempt; must not depend on what changes while the component is shown.
 * @param onMessage called with each message too, for a caller that keeps a history.
 */
export function useStream<M>(
  what: string,
  open: (abort: AbortSignal) => AsyncIterable<M>,
  onMessage?: (message: M) => void,
): Streamed<M> {
  const message = useSignal<M | null>(null);
  const following = useSignal<Following | null>(null);
  useEffect(() => {
    const made = follow(what, open, (next) => {
      message.value = next;
      onMessage?.(next);
    });
    following.value = made;
    return made.stop;
  }, []);
  return { message, following };
}
