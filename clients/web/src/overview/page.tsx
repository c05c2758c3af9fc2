// What runs, and what it earned: all rollouts, the reward curve, the newest groups.
import { computed } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { compact, reward } from "../lib/format";
import { type Key, useKeys } from "../lib/keys";
import { href, location_, setQuery } from "../lib/router";
import { CancelSheet } from "../ui/cancel";
import { FollowingNotice } from "../ui/notice";
import type { Row } from "./board";
import { Curve } from "./curve";
import { complete, drivers, ENDED_SHOWN, followed, followings, MOST_DRIVERS, rows, wanted, watch } from "./feed";
import { matches, misread, parseFilter } from "./filter";
import { curveOf, groupsOf } from "./groups";
import { GroupList } from "./grouplist";
import "./overview.css";
import { cancelInTable, groupInTable, moveInTable, RolloutTable } from "./table";

const CURVE_POINTS = 200;
const GROUPS_SHOWN = 8;

/** In the address, so that a filter can be sent to somebody. */
const query = computed(() => new URLSearchParams(location_.value.split("?")[1] ?? "").get("q") ?? "");
const filter = computed(() => parseFilter(query.value));
const shown = computed(() => rows.value.filter((row) => matches(row, filter.value)));
const curve = computed(() => curveOf(shown.value, CURVE_POINTS));
const newest = computed(() => groupsOf(shown.value).slice(-GROUPS_SHOWN).reverse());

const isBroken = computed(() => followings.value.some(({ following }) => following.health.value.kind === "broken"));

const KEYS: readonly Key[] = [
  {
    key: "/",
    does: "filter the rollouts",
    run: () => {
      const field = document.getElementById("filter");
      field?.focus();
      if (field instanceof HTMLInputElement) field.select();
    },
  },
  { key: "j", does: "next rollout (also ↓)", run: () => moveInTable(1) },
  { key: "k", does: "rollout before (also ↑)", run: () => moveInTable(-1) },
  { key: "g", does: "to the rollout's group", run: groupInTable },
  { key: "c", does: "cancel the rollout", run: cancelInTable },
];

const QUICK = [
  ["", "All"],
  ["state:live", "Live"],
  ["state:completed", "Completed"],
  ["state:failed", "Failed"],
] as const;

export default function Overview() {
  useKeys(KEYS);
  useEffect(watch, []);
  useEffect(() => {
    wanted.value = filter.value.driver;
  }, [filter.value.driver]);
  return (
    <div class="overview">
      <h1 class="visually-hidden">Rollouts</h1>
      {followings.value.map(({ driver, following }) => (
        <FollowingNotice key={driver} following={following} />
      ))}
      <LeftOut />
      <Numbers rows={shown.value} isKnown={complete.value} isStale={isBroken.value} />
      {curve.value.length > 0 && (
        <div class="panels">
          <Curve points={curve.value} />
          {newest.value.length > 0 && <GroupList groups={newest.value} />}
        </div>
      )}
      <FilterBar />
      {complete.value && !rows.value.length ? (
        <Nothing />
      ) : (
        <RolloutTable rows={shown.value} waiting={!complete.value} empty={emptyWords()} />
      )}
      <CancelSheet />
    </div>
  );
}

/** The drivers that are not followed, where there are too many. */
function LeftOut() {
  const left = drivers.value.filter((name) => !followed.value.includes(name));
  if (wanted.value || !left.length) return null;
  return (
    <p class="notice" role="status">
      <span>
        <strong>The rollouts of {MOST_DRIVERS} drivers are shown.</strong> Not shown: {left.map((name) => <code key={name}>{name} </code>)}
        Filter by <code>driver:{left[0]}</code> to see one of them.
      </span>
    </p>
  );
}

/** What stands in a table without rows. */
function emptyWords(): string {
  if (!complete.value) return isBroken.value ? "Nothing is known of any rollout yet." : "Asking the driver…";
  return ["No rollout matches.", ...misread(query.value)].join(" ");
}

function FilterBar() {
  const states = (text: string) => text.replace(/(^|\s)state:\S*/g, " ").trim();
  return (
    <div class="filterbar" role="search">
      <input
        id="filter"
        class="field"
        type="search"
        placeholder="Filter: words, state:failed, agent:shell, run:…, group:…, task:…, namespace:…, driver:d0, label:team=a"
        aria-label="Filter the rollouts"
        spellcheck={false}
        autocomplete="off"
        value={query.value}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape" || event.key === "Enter") event.currentTarget.blur();
          if (event.key === "Enter") moveInTable(0);
        }}
      />
      <div class="quick" role="group" aria-label="State">
        {QUICK.map(([text, name]) => {
          const isOn = text ? query.value.split(/\s+/).includes(text) : !/(^|\s)state:/.test(query.value);
          return (
            <button
              key={name}
              type="button"
              class="button quiet"
              aria-pressed={isOn}
              onClick={() => setText(`${states(query.value)} ${text}`.trim())}
            >
              {name}
            </button>
          );
        })}
      </div>
      <span class="muted num" aria-live="polite">
        {!complete.value
          ? ""
          : shown.value.length === rows.value.length
            ? `${compact(rows.value.length)} rollouts`
            : `${compact(shown.value.length)} of ${compact(rows.value.length)}`}
      </span>
    </div>
  );
}

function setText(text: string): void {
  const params = new URLSearchParams();
  if (text) params.set("q", text);
  setQuery(params);
}

/** Figures over the rows; none while nothing is known, and greyed out while nobody tells how they go on. */
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
    <dl class={isStale ? "numbers stale" : "numbers"}>
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

function Figure({ name, value, tone = "" }: { name: string; value: string; tone?: string }) {
  return (
    <div class={`figure ${tone}`}>
      <dt>{name}</dt>
      <dd class="num">{value}</dd>
    </div>
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
