// The filter of the address, and the field that changes it: pages that show the newest rollouts share it.
import { computed } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { compact } from "../lib/format";
import type { Key } from "../lib/keys";
import { changeQuery, href, location_, queryOf } from "../lib/router";
import { FollowingNotice } from "../ui/notice";
import { drivers, followed, MOST_DRIVERS, newest, wanted } from "./feed";
import { matches, parseFilter } from "./filter";

/** In the address, so that a filter can be sent to somebody. */
export const text = computed(() => queryOf(location_.value).get("q") ?? "");
const filter = computed(() => parseFilter(text.value));
/** The rows that match it. */
export const shown = computed(() => newest.rows.value.filter((row) => matches(row, filter.value)));

export const FILTER_KEY: Key = {
  key: "/",
  does: "filter the rollouts",
  run: () => {
    const field = document.getElementById("filter");
    field?.focus();
    if (field instanceof HTMLInputElement) field.select();
  },
};

/** Follows the newest rollouts, of the driver that the filter names, for as long as the component is shown. */
export function useNewest(): void {
  // Before the streams begin, so that no other driver is asked first.
  useEffect(() => {
    wanted.value = filter.value.driver;
  }, [filter.value.driver]);
  useEffect(newest.watch, []);
  // After they have ended. Pages without the field show all drivers: a filter that nobody sees must not hold for them.
  useEffect(
    () => () => {
      wanted.value = "";
    },
    [],
  );
}

/** Changes the filter, and begins at the first page again. */
export function setText(next: string): void {
  changeQuery({ q: next, page: "" });
}

/** What is wrong with the streams, and which drivers are not followed. */
export function FeedNotices() {
  return (
    <>
      {newest.followings.value.map(({ driver, following }) => (
        <FollowingNotice key={driver} following={following} />
      ))}
      <LeftOut />
    </>
  );
}

/** The drivers that are not followed, where there are too many. */
export function LeftOut() {
  const left = drivers.value.filter((name) => !followed.value.includes(name));
  if (wanted.value || !left.length) return null;
  const one = `driver:${left[0]}`;
  return (
    <p class="notice" role="status">
      <span>
        <strong>The rollouts of {MOST_DRIVERS} drivers are shown.</strong> Not shown: {left.map((name) => <code key={name}>{name} </code>)}
        Filter the <a href={`${href("/")}?${new URLSearchParams({ q: one }).toString()}`}>rollouts</a> by <code>{one}</code> to see those of one.
      </span>
    </p>
  );
}

/** The field; `onEnter` goes on from it. */
export function FilterField({ onEnter }: { onEnter?: () => void }) {
  return (
    <input
      id="filter"
      class="field"
      type="search"
      placeholder="Filter: words, state:failed, agent:shell, run:…, group:…, task:…, namespace:…, driver:d0, label:team=a"
      aria-label="Filter the rollouts"
      spellcheck={false}
      autocomplete="off"
      value={text.value}
      onInput={(event) => setText(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.key === "Escape" || event.key === "Enter") event.currentTarget.blur();
        if (event.key === "Enter") onEnter?.();
      }}
    />
  );
}

/** How many match. */
export function Count() {
  const all = newest.rows.value.length;
  const words = shown.value.length === all ? `${compact(all)} rollouts` : `${compact(shown.value.length)} of ${compact(all)} rollouts`;
  return (
    <span class="muted num" aria-live="polite">
      {newest.complete.value ? words : ""}
    </span>
  );
}
