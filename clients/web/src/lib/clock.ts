// The time, each second, for what shows how long something has been going on. Stands still while nobody looks.
import { signal } from "@preact/signals";

/** Milliseconds since the epoch. */
export const now = signal(Date.now());

/** Starts it. To be called once. */
export function startClock(): void {
  setInterval(() => {
    if (!document.hidden) now.value = Date.now();
  }, 1000);
}
