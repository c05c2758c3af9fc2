/**
 * Where a rollout's time went, as bars on one line of time.
 *
 * Made of the events, since they have the order and the times; a rollout that was tried again has each phase of each attempt.
 * Invariant (tested): bars do not overlap, follow each other in time, and only the last one may go on.
 */

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { Phase, type RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";

/** A phase from `start` to `end`, both in milliseconds since the epoch; without an end it goes on. */
export interface PhaseBar {
  readonly phase: Phase;
  readonly attempt: number;
  readonly start: number;
  readonly end: number | undefined;
}

/** The phases that events report, in order; ENDED is no phase but the end of the last. */
export function phaseBars(events: readonly RolloutEvent[]): PhaseBar[] {
  const bars: PhaseBar[] = [];
  let attempt = 1;
  for (const event of events) {
    const time = event.time ? timestampMs(event.time) : undefined;
    if (event.event.case === "attemptFailed") attempt = event.event.value.attempt + 1;
    const isOver = event.event.case === "ended";
    if (time === undefined || (event.event.case !== "phaseChanged" && !isOver)) continue;
    const last = bars.at(-1);
    const start = Math.max(time, last?.end ?? last?.start ?? time);
    if (last && last.end === undefined) bars[bars.length - 1] = { ...last, end: start };
    if (event.event.case === "phaseChanged" && event.event.value.phase !== Phase.ENDED) {
      bars.push({ phase: event.event.value.phase, attempt, start, end: undefined });
    }
  }
  return bars;
}

/** How long a bar is, in seconds; one that goes on is as long as it is `now`. */
export const seconds = (bar: PhaseBar, now: number): number => Math.max(0, (bar.end ?? now) - bar.start) / 1000;
