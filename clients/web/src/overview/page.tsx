// What runs, and what it earned: all rollouts, the reward of the newest runs, the newest groups.
import { computed } from "@preact/signals";

import { compact, reward } from "../lib/format";
import { type Key, useKeys } from "../lib/keys";
import { href, location_, queryOf } from "../lib/router";
import { CancelSheet } from "../ui/cancel";
import { windowOf } from "../run/smoothing";
import { Figure } from "../ui/figure";
import { ViewsButton } from "../ui/views";
import type { Row } from "./board";
import { Curve } from "./curve";
import { curvesOf } from "./curves";
import { ENDED_SHOWN, newest } from "./feed";
import { misread } from "./filter";
import { Count, FeedNotices, FILTER_KEY, FilterField, setText, shown, text, useNewest } from "./filterfield";
import { groupsOf } from "./groups";
import { GroupList } from "./grouplist";
import "./overview.css";
import { cancelInTable, copyInTable, groupInTable, moveInTable, RolloutTable, SortField } from "./table";

const GROUPS_SHOWN = 8;

const curves = computed(() => curvesOf(shown.value, (usual) => windowOf(queryOf(location_.value), usual)));
const newestGroups = computed(() => groupsOf(shown.value).slice(-GROUPS_SHOWN).reverse());

const KEYS: readonly Key[] = [
  FILTER_KEY,
  { key: "j", does: "next rollout (also ↓)", run: () => moveInTable(1) },
  { key: "k", does: "rollout before (also ↑)", run: () => moveInTable(-1) },
  { key: "g", does: "to the rollout's group", run: groupInTable },
  { key: "c", does: "cancel the rollout", run: cancelInTable },
  { key: "y", does: "copy the rollout's id", run: copyInTable },
];

const QUICK = [
  ["", "All"],
  ["state:live", "Live"],
  ["state:completed", "Completed"],
  ["state:failed", "Failed"],
] as const;

export default function Overview({ query }: { query: URLSearchParams }) {
  useKeys(KEYS);
  useNewest();
  return (
    <div class="overview">
      <h1 class="visually-hidden">Rollouts</h1>
      <FeedNotices />
      <Numbers rows={shown.value} isKnown={newest.complete.value} isStale={newest.isBroken.value} />
      {curves.value.lines.length > 0 && (
        <div class="panels">
          <Curve curves={curves.value} />
          {newestGroups.value.length > 0 && <GroupList groups={newestGroups.value} />}
        </div>
      )}
      <FilterBar query={query} />
      {newest.complete.value && !newest.rows.value.length ? (
        <Nothing />
      ) : (
        <RolloutTable rows={shown.value} query={query} waiting={!newest.complete.value} empty={emptyWords()} />
      )}
      <CancelSheet />
    </div>
  );
}

/** What stands in a table without rows. */
function emptyWords(): string {
  if (!newest.complete.value) return newest.isBroken.value ? "Nothing is known of any rollout yet." : "Asking the driver…";
  return ["No rollout matches.", ...misread(text.value)].join(" ");
}

function FilterBar({ query }: { query: URLSearchParams }) {
  const without = (filter: string) => filter.replace(/(^|\s)state:\S*/g, " ").trim();
  return (
    <div class="filterbar" role="search">
      <FilterField onEnter={() => moveInTable(0)} />
      <div class="quick" role="group" aria-label="State">
        {QUICK.map(([state, name]) => {
          const isOn = state ? text.value.split(/\s+/).includes(state) : !/(^|\s)state:/.test(text.value);
          return (
            <button
              key={name}
              type="button"
              class="button quiet"
              aria-pressed={isOn}
              onClick={() => setText(`${without(text.value)} ${state}`.trim())}
            >
              {name}
            </button>
          );
        })}
      </div>
      <SortField query={query} />
      <Count />
      <ViewsButton />
    </div>
  );
}

/** Figures over the rows; none while nothing is known, and greyed out while no driver reports how they go on. */
function Numbers({ rows: all, isKnown, isStale }: { rows: readonly Row[]; isKnown: boolean; isStale: boolean }) {
  let live = 0;
  let completed = 0;
  let failed = 0;
  let calls = 0;
  let tokens = 0;
  const rewards: number[] = [];
  let version: number | null = null;
  for (const row of all) {
    if (row.ended === null) live += 1;
    if (row.state === "completed") completed += 1;
    if (row.state === "failed") failed += 1;
    calls += row.calls;
    tokens += row.sampledTokens;
    if (row.reward !== null) rewards.push(row.reward);
    if (row.versions) version = Math.max(version ?? 0, row.versions[1]);
  }
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const told = (value: string): string => (isKnown ? value : "–");
  return (
    <dl class={isStale ? "figures stale" : "figures"}>
      <Figure name="Live" value={told(compact(live))} tone={live ? "busy" : ""} />
      <Figure name="Completed" value={told(compact(completed))} />
      <Figure name="Failed" value={told(compact(failed))} tone={failed ? "bad" : ""} />
      <Figure name="Mean reward" value={mean === null ? "–" : reward(mean)} />
      <Figure name="Model calls" value={told(compact(calls))} />
      <Figure name="Sampled tokens" value={told(compact(tokens))} />
      <Figure name="Policy version" value={version === null ? "–" : String(version)} />
    </dl>
  );
}

function Nothing() {
  return (
    <div class="card empty">
      <h2>Nothing has run yet</h2>
      <p>
        <a href={href("/new")}>Start a rollout</a>, or run <code>penstock rollout --agent shell --task FILE</code>. The newest{" "}
        {compact(ENDED_SHOWN)} that have ended are kept in sight.
      </p>
    </div>
  );
}
