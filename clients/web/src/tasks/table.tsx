// A table of tasks or agents: how often each is solved, and how long it takes.
import { compact, duration, reward } from "../lib/format";
import { href } from "../lib/router";
import { oneLine } from "../rollout/safe";
import { Ago } from "../run/columns";
import { type Column, DataTable } from "../ui/datatable";
import { Mean, percent } from "../ui/figure";
import type { By, Slice, Standing } from "./model";
import { versionsPlace } from "./versions";

const TONES: Readonly<Record<Standing, string>> = { "always 0": "bad", "always 1": "good", mixed: "busy", one: "", none: "" };
const WORDS: Readonly<Record<Standing, string>> = { "always 0": "always 0", "always 1": "always 1", mixed: "mixed", one: "one rollout", none: "not graded" };

/** How the rewards of a task stand to each other: what is always 0 or 1 teaches a group nothing. */
export function StandingChip({ standing }: { standing: Standing }) {
  return <span class={`chip ${TONES[standing]}`}>{WORDS[standing]}</span>;
}

/** How many policy versions its rollouts began with. */
const versionCount = ({ rows }: Slice): number => new Set(rows.flatMap(({ versions }) => versions?.[0] ?? [])).size;

const columnsOf = (by: By, search: string, run: string | undefined): readonly Column<Slice>[] => [
  {
    ...{ key: by, name: by === "task" ? "Task" : "Agent", sortBy: (slice) => slice.key },
    cell: (slice) => (
      <a href={`${href(by === "task" ? "/tasks" : "/agents", slice.key)}${search}`} title={slice.key}>
        <bdi>{oneLine(slice.key, 80) || "(without a name)"}</bdi>
      </a>
    ),
  },
  ...(by === "task"
    ? [{ key: "standing", name: "Rewards", title: "Whether its graded rollouts always earn the least, always the most, or neither", sortBy: (slice: Slice) => slice.standing, cell: (slice: Slice) => <StandingChip standing={slice.standing} /> }]
    : []),
  {
    ...{ key: "solved", name: "Solved", title: "Share of the graded rollouts with the most that a reward can be, with its 95 % interval (Wilson)", isNumber: true, sortBy: (slice) => slice.solved?.value ?? null },
    cell: (slice) => <Mean of={slice.solved} format={percent} />,
  },
  { ...{ key: "reward", name: "Mean reward", isNumber: true, isWide: true, sortBy: (slice) => slice.reward?.value ?? null }, cell: (slice) => (slice.reward ? reward(slice.reward.value) : "–") },
  { ...{ key: "rollouts", name: "Rollouts", isNumber: true, sortBy: (slice) => slice.rows.length }, cell: (slice) => <span title={`${slice.graded} graded`}>{compact(slice.rows.length)}</span> },
  { ...{ key: "failed", name: "Failed", isNumber: true, isWide: true, sortBy: (slice) => slice.failed }, cell: (slice) => compact(slice.failed) },
  { ...{ key: "time", name: "Median time", isNumber: true, sortBy: (slice) => slice.time }, cell: (slice) => (slice.time === null ? "–" : duration(slice.time)) },
  { ...{ key: "calls", name: "Median calls", isNumber: true, isWide: true, sortBy: (slice) => slice.calls }, cell: (slice) => (slice.calls === null ? "–" : compact(slice.calls)) },
  { ...{ key: "tokens", name: "Median tokens", title: "Sampled ones", isNumber: true, isWide: true, sortBy: (slice) => slice.tokens }, cell: (slice) => (slice.tokens === null ? "–" : compact(slice.tokens)) },
  { ...{ key: "others", name: by === "task" ? "Agents" : "Tasks", isNumber: true, isWide: true, sortBy: (slice) => slice.others }, cell: (slice) => compact(slice.others) },
  ...(by === "task"
    ? [
        {
          ...{ key: "versions", name: "Versions", title: "Policy versions that its rollouts began with, to be compared", isNumber: true, isWide: true, sortBy: versionCount },
          cell: (slice: Slice) => {
            const count = versionCount(slice);
            return count > 1 ? (
              <a href={versionsPlace(slice.key, run === undefined ? {} : { run })} aria-label={`Compare ${count} versions of ${slice.key}`}>
                {compact(count)}
              </a>
            ) : (
              compact(count)
            );
          },
        },
      ]
    : []),
  { ...{ key: "last", name: "Last activity", isNumber: true, isWide: true, sortBy: (slice) => slice.last }, cell: (slice) => <Ago at={slice.last} /> },
];

interface Props {
  readonly by: By;
  readonly slices: readonly Slice[];
  readonly query: URLSearchParams;
  readonly empty: string;
  /** What links to a task or agent take along: "?q=...", or nothing. */
  readonly search?: string;
  /** The run that they are of, for links to a task's versions; undefined = of any. */
  readonly run?: string;
}

export function SliceTable({ by, slices, query, empty, search = "", run }: Props) {
  return <DataTable label={by === "task" ? "Tasks" : "Agents"} columns={columnsOf(by, search, run)} rows={slices} keyOf={(slice) => slice.key} query={query} empty={empty} />;
}
