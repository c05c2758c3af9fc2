// Keys of a page: registered while it is shown, listed by "?".
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

export interface Key {
  /** As KeyboardEvent.key has it: "/", "?", "j", "Enter". */
  readonly key: string;
  /** What it does, for the help. */
  readonly does: string;
  readonly run: (event: KeyboardEvent) => void;
}

/** All that hold now, the newest last. */
export const keys = signal<readonly Key[]>([]);

/** Holds keys for as long as the component is shown. The list must be stable (a constant, or from useMemo). */
export function useKeys(given: readonly Key[]): void {
  useEffect(() => {
    keys.value = [...keys.peek(), ...given];
    return () => {
      keys.value = keys.peek().filter((item) => !given.includes(item));
    };
  }, [given]);
}

/** Whether keys are somebody's text now. */
function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  return target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
}

/** Listens. To be called once. */
export function startKeys(): void {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const found = keys.peek().findLast((item) => item.key === event.key);
    if (!found) return;
    event.preventDefault();
    found.run(event);
  });
}
