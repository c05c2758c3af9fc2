// Why the rollouts of a run failed: the most frequent reasons, as counts and as curves.
import { type Estimate, shareOf } from "../lib/estimate";
import type { Row } from "../overview/board";
import { finished } from "../tasks/model";
import { lineOf, type LinePoint, type Measure, type RunPoint } from "./model";

/** Reasons that are shown apart. */
const MOST_REASONS = 3;
const OTHERS = "other reasons";

/** How many of some rollouts failed for each reason, the most frequent first. */
export function reasonsOf(rows: readonly Row[]): (readonly [string, number])[] {
  const found = new Map<string, number>();
  for (const row of rows) if (row.state === "failed") found.set(reasonOf(row), (found.get(reasonOf(row)) ?? 0) + 1);
  return [...found].sort(([a, some], [b, more]) => more - some || (a < b ? -1 : 1));
}

const reasonOf = ({ reason, cause }: Row): string => reason || cause || "unknown";

/** The three most frequent in words: "4 AGENT_TIMED_OUT, 1 BUDGET_EXHAUSTED, 2 for other reasons"; empty = none failed. */
export function reasonWords(rows: readonly Row[]): string {
  const reasons = reasonsOf(rows);
  const others = reasons.slice(MOST_REASONS).reduce((sum, [, count]) => sum + count, 0);
  return [...reasons.slice(0, MOST_REASONS).map(([reason, count]) => `${count} ${reason}`), ...(others ? [`${others} for ${OTHERS}`] : [])].join(", ");
}

export interface ReasonLine {
  readonly name: string;
  readonly points: readonly LinePoint[];
}

/**
 * For each of the three most frequent reasons of all points, and for the others together, the share of the ended rollouts that failed
 * for it. Empty = none failed.
 *
 * @param window how many points count together.
 */
export function reasonLines(points: readonly RunPoint[], window: number): ReasonLine[] {
  const reasons = reasonsOf(points.flatMap(({ rows }) => rows)).map(([reason]) => reason);
  const shown = new Set(reasons.slice(0, MOST_REASONS));
  const line = (name: string, counts: (reason: string) => boolean): ReasonLine => ({ name, points: lineOf(points, measureOf(name, counts), window) });
  return [...[...shown].map((name) => line(name, (reason) => reason === name)), ...(reasons.length > shown.size ? [line(OTHERS, (reason) => !shown.has(reason))] : [])];
}

/** What the bands of these lines are. */
export const REASONS_BAND = "95 % interval of the share (Wilson)";

function measureOf(name: string, counts: (reason: string) => boolean): Measure {
  const of = (rows: readonly Row[]): Estimate | null => {
    const ended = finished(rows);
    return shareOf(ended.filter((row) => row.state === "failed" && counts(reasonOf(row))).length, ended.length);
  };
  return { key: name, name, band: REASONS_BAND, of };
}
