// The columns of a table of runs.
import { now } from "../lib/clock";
import { ago, compact, reward } from "../lib/format";
import { href } from "../lib/router";
import { oneLine } from "../rollout/safe";
import type { Column } from "../ui/datatable";
import { Mean, percent } from "../ui/figure";
import type { Run } from "./model";

/** A run's name: its id, with its namespace if that is not the usual one. */
export const runName = (ref: string): string => oneLine(ref, 140);

const share = (part: number, whole: number): string => (whole ? percent(part / whole) : "–");
const endedOf = (run: Run): number => run.completed + run.failed;

export const RUN_COLUMNS: readonly Column<Run>[] = [
  {
    ...{ key: "run", name: "Run", sortBy: (run) => run.ref },
    cell: (run) => (
      <a href={href("/runs", run.ref)} title={run.ref}>
        <bdi>{runName(run.ref)}</bdi>
      </a>
    ),
  },
  {
    ...{ key: "rollouts", name: "Rollouts", isNumber: true, sortBy: (run) => run.rows.length },
    cell: (run) => (
      <>
        {compact(run.rows.length)}
        {run.live > 0 && <span class="chip busy">{compact(run.live)} live</span>}
      </>
    ),
  },
  {
    ...{ key: "reward", name: "Mean reward", title: "With its 95 % interval, over tasks (Wilson)", isNumber: true, sortBy: (run) => run.reward?.value ?? null },
    cell: (run) => <Mean of={run.reward} format={reward} />,
  },
  {
    ...{ key: "solved", name: "Solved", title: "Of the graded rollouts, those with the most that a reward can be", isNumber: true, isWide: true, sortBy: (run) => run.solved?.value ?? null },
    cell: (run) => (run.solved ? percent(run.solved.value) : "–"),
  },
  {
    ...{ key: "failed", name: "Failed", title: "Of those that ended and were not cancelled", isNumber: true, isWide: true, sortBy: (run) => (endedOf(run) ? run.failed / endedOf(run) : null) },
    cell: (run) => <span title={`${run.failed} of ${endedOf(run)}`}>{share(run.failed, endedOf(run))}</span>,
  },
  {
    ...{ key: "rate", name: "A minute", title: "Rollouts that end in a minute, over its newest 100", isNumber: true, isWide: true, sortBy: (run) => run.perMinute },
    cell: (run) => (run.perMinute === null ? "–" : rate(run.perMinute)),
  },
  {
    ...{ key: "tasks", name: "Tasks", isNumber: true, isWide: true, sortBy: (run) => run.tasks },
    cell: (run) => compact(run.tasks),
  },
  {
    ...{ key: "agents", name: "Agents", isWide: true, sortBy: (run) => run.agents.join(" ") },
    cell: (run) => (
      <span title={run.agents.join("\n")}>
        <bdi>{oneLine(run.agents.join(", "), 60)}</bdi>
      </span>
    ),
  },
  {
    ...{ key: "version", name: "Version", title: "Oldest to newest policy version", isNumber: true, isWide: true, sortBy: (run) => run.versions?.[1] ?? null },
    cell: (run) => (run.versions ? (run.versions[0] === run.versions[1] ? run.versions[1] : `${run.versions[0]}–${run.versions[1]}`) : "–"),
  },
  {
    ...{ key: "last", name: "Last activity", title: "When one of its rollouts began or ended last", isNumber: true, sortBy: (run) => run.last },
    cell: (run) => <Ago at={run.last} />,
  },
];

/** Rollouts a minute. */
export const rate = (value: number): string => (value >= 100 ? compact(Math.round(value)) : String(Math.round(value * 10) / 10));

/** How long ago, going on. */
export function Ago({ at }: { at: number }) {
  return <span title={new Date(at).toLocaleString()}>{ago(Math.max(0, now.value - at))}</span>;
}
