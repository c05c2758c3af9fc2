// All runs: what each earned, how much of it failed, how fast it goes.
import { computed, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { compact } from "../lib/format";
import { changed, go, href } from "../lib/router";
import { Feed, MOST_ENDED, newest } from "../overview/feed";
import { LeftOut } from "../overview/filterfield";
import { type Column, DataTable } from "../ui/datatable";
import { FollowingNotice } from "../ui/notice";
import { ViewsButton } from "../ui/views";
import { RUN_COLUMNS, runName } from "./columns";
import { refOf, type Run, runsOf } from "./model";
import "./run.css";

/** Lines of one picture that people can distinguish. */
export const MOST_RUNS = 4;

const feed = new Feed(MOST_ENDED);
/** Once all have come: figures over thousands of rows are not computed for each part of them. */
const runs = computed(() => (feed.complete.value ? runsOf(feed.rows.value) : []));
/** The refs of the runs that the page has seen, newest first. */
export const knownRefs = computed(() => [...new Set([...runs.value.map((run) => run.ref), ...newest.rows.value.filter((row) => row.run).map(refOf)])]);
/** The refs of those that are to be compared, in the order in which they were chosen. */
const chosen = signal<readonly string[]>([]);

const COLUMNS: readonly Column<Run>[] = [
  {
    ...{ key: "chosen", name: "Pick", title: "Pick the runs to compare", sortBy: (run) => -chosen.value.indexOf(run.ref) },
    cell: (run) => <Pick run={run} />,
  },
  ...RUN_COLUMNS,
];

export default function Runs({ query }: { query: URLSearchParams }) {
  useEffect(feed.watch, []);
  const known = chosen.value.filter((ref) => runs.value.some((run) => run.ref === ref));
  const without = feed.complete.value ? feed.rows.value.filter((row) => !row.run).length : 0;
  return (
    <div class="runs">
      <div class="title">
        <h1>Runs</h1>
        <span class="muted num" aria-live="polite">
          {feed.complete.value && (runs.value.length === 1 ? "1 run" : `${compact(runs.value.length)} runs`)}
        </span>
        <span class="grow" />
        <button type="button" class="button primary" disabled={known.length < 2} onClick={() => compare(known)}>
          {known.length < 2 ? "Compare: pick two to four" : `Compare ${known.length} runs`}
        </button>
        <ViewsButton />
      </div>
      {feed.followings.value.map(({ driver, following }) => (
        <FollowingNotice key={driver} following={following} />
      ))}
      <LeftOut />
      <DataTable
        label="Runs"
        columns={COLUMNS}
        rows={runs.value}
        keyOf={(run) => run.ref}
        query={query}
        empty={feed.complete.value ? "No rollout has a run id: a trainer gives one as it creates rollouts." : "Asking the driver…"}
      />
      <p class="muted">
        {feed.isFull.value && `Of each driver the newest ${compact(MOST_ENDED)} ended rollouts are counted: older ones, and runs that have no newer, are left out. `}
        {without > 0 && (
          <>
            {compact(without)} rollouts have no run id: <a href={href("/")}>all rollouts</a>.
          </>
        )}
      </p>
    </div>
  );
}

function compare(refs: readonly string[]): void {
  const [first = "", ...others] = refs;
  go(placeOf(first, others));
}

/** Where some runs are shown in one picture. */
export function placeOf(first: string, others: readonly string[], query = new URLSearchParams()): string {
  const next = changed(query, { with: "" });
  for (const ref of others) next.append("with", ref);
  const text = next.toString();
  return `/runs/${encodeURIComponent(first)}${text ? `?${text}` : ""}`;
}

function Pick({ run }: { run: Run }) {
  const isOn = chosen.value.includes(run.ref);
  return (
    <input
      type="checkbox"
      class="pick"
      aria-label={`Compare ${runName(run.ref)}`}
      checked={isOn}
      disabled={!isOn && chosen.value.length >= MOST_RUNS}
      onChange={() => (chosen.value = isOn ? chosen.value.filter((ref) => ref !== run.ref) : [...chosen.value, run.ref])}
    />
  );
}
