/** The phases of a rollout on one line of time; the last goes on while it does. */

import { useEffect, useState } from "preact/hooks";
import type { RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { type PhaseBar, phaseBars, seconds } from "./phases";
import { durationWords, phaseWord } from "./words";

const SHOWN_SHARE = 0.12;

export function Timeline({ events }: { events: readonly RolloutEvent[] }) {
  const bars = phaseBars(events);
  const isOpen = bars.at(-1)?.end === undefined && bars.length > 0;
  const now = useNow(isOpen);
  if (bars.length === 0) return <p class="muted">It has not begun.</p>;
  const whole = bars.reduce((sum, bar) => sum + seconds(bar, now), 0) || 1;
  const attempts = new Set(bars.map((bar) => bar.attempt)).size;
  return (
    <div class="timeline">
      <div class="timeline-line" aria-hidden="true">
        {bars.map((bar, index) => {
          const share = seconds(bar, now) / whole;
          return (
            <div key={index} class={barClass(bar)} style={{ flexGrow: Math.max(share, 0.004) }} title={barTitle(bar, now)}>
              {share > SHOWN_SHARE && <span>{phaseWord(bar.phase)}</span>}
            </div>
          );
        })}
      </div>
      <ol class="timeline-list">
        {bars.map((bar, index) => (
          <li key={index}>
            <span class={`dot ${barClass(bar)}`} />
            {attempts > 1 && <span class="muted">attempt {bar.attempt}: </span>}
            {phaseWord(bar.phase)} <span class="muted num">{durationWords(seconds(bar, now))}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}

const barClass = (bar: PhaseBar): string => `phase phase-${bar.phase}${bar.end === undefined ? " phase-open" : ""}`;
const barTitle = (bar: PhaseBar, now: number): string => `${phaseWord(bar.phase)}: ${durationWords(seconds(bar, now))}`;

/** The time, anew each second while it matters. */
export function useNow(isTicking: boolean): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    if (!isTicking) return;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isTicking]);
  return now;
}
