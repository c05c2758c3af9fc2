// All rows, of which only those in sight are in the document: a thousand cost as much as thirty.
import { computed, signal, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";

import { now } from "../lib/clock";
import { compact, duration, plain, reward } from "../lib/format";
import { changeQuery, go, href } from "../lib/router";
import { nextSorting, parseSorting, sorted, type SortKey } from "../lib/sorting";
import { askToCancel } from "../ui/cancel";
import { copied } from "../ui/copyid";
import { ariaSort, SortButton } from "../ui/datatable";
import { rolloutName, shortName } from "../ui/name";
import { drivers } from "./feed";
import { DEFAULT_NAMESPACE, PHASE_NAMES, type Row, type State } from "./board";

const MARGIN = 8;

/** Pixels of a row: CSS says it too (--row-height). */
const rowHeight = signal(44);
const active = signal<string | null>(null);
const current = signal<readonly Row[]>([]);
const wantsFocus = signal(false);
const activeIndex = computed(() => current.value.findIndex((row) => row.id === active.value));

/** Goes on by some rows; 0 = to the one that was last gone to, or the first. */
export function moveInTable(by: number): void {
  const rows = current.peek();
  if (!rows.length) return;
  const from = activeIndex.peek();
  const to = from < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, from + by));
  active.value = rows[to]?.id ?? null;
  wantsFocus.value = true;
}

/** The row that was gone to last, while it is shown. */
const activeRow = (): Row | undefined => current.peek()[activeIndex.peek()];

/** Asks whether to cancel the rollout of the row that was gone to last. */
export function cancelInTable(): void {
  const row = activeRow();
  if (row && row.ended === null) askToCancel("rollout", row.id);
}

/** Goes to the group of the row that was gone to last. */
export function groupInTable(): void {
  const row = activeRow();
  if (row?.group) go("/groups", row.group);
}

/** Puts the id of the row that was gone to last on the clipboard. */
export function copyInTable(): void {
  const row = activeRow();
  if (row) void copied(row.id);
}

const timeOf = (row: Row): number => (row.ended ?? Date.now()) - row.created;

/** By the names of the columns, in the address in lower case. Without one, the newest is first. */
const SORTS: Readonly<Record<string, (row: Row) => SortKey>> = {
  state: stateText,
  rollout: rolloutName,
  task: (row) => row.task,
  agent: (row) => row.agent,
  version: (row) => row.versions?.[1] ?? null,
  calls: (row) => row.calls,
  tokens: (row) => row.sampledTokens,
  reward: (row) => row.reward,
  time: timeOf,
};
const SORT_NAMES = Object.keys(SORTS);

interface Props {
  readonly rows: readonly Row[];
  readonly query: URLSearchParams;
  readonly waiting: boolean;
  readonly empty: string;
}

export function RolloutTable({ rows: unsorted, query, waiting, empty }: Props) {
  const asked = query.get("sort");
  const sorting = parseSorting(asked, SORT_NAMES);
  const rows = useMemo(() => {
    const keyOf = sorting && SORTS[sorting.by];
    return sorting && keyOf ? sorted(unsorted, keyOf, sorting.isDown) : unsorted;
  }, [unsorted, asked]);
  const body = useRef<HTMLDivElement>(null);
  const range = useSignal<readonly [number, number]>([0, 40]);
  useLayoutEffect(() => {
    current.value = rows;
  }, [rows]);

  const look = () => {
    const element = body.current;
    if (!element) return;
    rowHeight.value = parseFloat(getComputedStyle(element).getPropertyValue("--row-height")) || 44;
    const top = element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / rowHeight.value) - MARGIN);
    const count = Math.ceil(innerHeight / rowHeight.value) + 2 * MARGIN;
    const [a, b] = range.peek();
    if (first !== a || first + count !== b) range.value = [first, first + count];
  };
  useEffect(() => {
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, []);

  const index = activeIndex.value;
  useLayoutEffect(() => {
    const element = body.current;
    if (!wantsFocus.value || index < 0 || !element) return;
    wantsFocus.value = false;
    const top = element.getBoundingClientRect().top + index * rowHeight.value;
    const header = 110;
    if (top < header) scrollBy({ top: top - header });
    else if (top + rowHeight.value > innerHeight - 16) scrollBy({ top: top + rowHeight.value - innerHeight + 16 });
    look();
    queueMicrotask(() => element.querySelector<HTMLElement>(`[data-index="${index}"]`)?.focus({ preventScroll: true }));
  });

  const [first, end] = range.value;
  const height = rowHeight.value;
  return (
    <div class="card rollouts" role="table" aria-label="Rollouts" aria-rowcount={rows.length + 1} aria-busy={waiting}>
      <div class="head" role="row" aria-rowindex={1}>
        {COLUMNS.map((name) => {
          const by = name.toLowerCase();
          return (
            <span role="columnheader" key={name} class={NUMBERS.has(name) ? "right" : ""} aria-sort={ariaSort(sorting, by)}>
              <SortButton name={name} by={by} sorting={sorting} onSort={() => changeQuery({ sort: nextSorting(sorting, by, NUMBERS.has(name)) })} />
            </span>
          );
        })}
        <span role="columnheader">
          <span class="visually-hidden">Actions</span>
        </span>
      </div>
      <div
        class="rows"
        role="rowgroup"
        ref={body}
        style={{ height: `${rows.length * height}px` }}
        onKeyDown={(event) => onKey(event, rows)}
      >
        {rows.slice(first, end).map((row, offset) => (
          <RowLine key={row.id} row={row} index={first + offset} top={(first + offset) * height} focusable={index < 0 ? first + offset === 0 : first + offset === index} />
        ))}
      </div>
      {!rows.length && <p class="empty">{empty}</p>}
    </div>
  );
}

/** The order, where the table has no heads: on a narrow screen. */
export function SortField({ query }: { query: URLSearchParams }) {
  const sorting = parseSorting(query.get("sort"), SORT_NAMES);
  return (
    <select class="field sortfield" aria-label="Order" value={sorting ? `${sorting.isDown ? "-" : ""}${sorting.by}` : ""} onChange={(event) => changeQuery({ sort: event.currentTarget.value })}>
      <option value="">Newest first</option>
      {COLUMNS.flatMap((name) =>
        ["", "-"].map((sign) => (
          <option key={sign + name} value={sign + name.toLowerCase()}>
            {name} {sign ? "▾" : "▴"}
          </option>
        )),
      )}
    </select>
  );
}

const COLUMNS = ["State", "Rollout", "Task", "Agent", "Version", "Calls", "Tokens", "Reward", "Time"];
const NUMBERS = new Set(["Version", "Calls", "Tokens", "Reward", "Time"]);

function onKey(event: KeyboardEvent, rows: readonly Row[]): void {
  const page = Math.max(1, Math.floor(innerHeight / rowHeight.peek()) - 4);
  const steps: Record<string, number> = {
    ArrowDown: 1,
    ArrowUp: -1,
    PageDown: page,
    PageUp: -page,
    Home: -rows.length,
    End: rows.length,
  };
  const step = steps[event.key];
  if (step !== undefined) {
    event.preventDefault();
    moveInTable(step);
    return;
  }
  const row = rows[activeIndex.peek()];
  if (!row || event.target !== event.currentTarget && !(event.target as HTMLElement).matches("[data-index]")) return;
  if (event.key === "Enter") go("/rollouts", row.id);
}

const TONES: Readonly<Record<State, string>> = { waiting: "", running: "busy", completed: "good", failed: "bad", cancelled: "warn" };

function RowLine({ row, index, top, focusable }: { row: Row; index: number; top: number; focusable: boolean }) {
  return (
    <div
      class="line"
      role="row"
      aria-rowindex={index + 2}
      data-index={index}
      tabIndex={focusable ? 0 : -1}
      style={{ transform: `translateY(${top}px)` }}
      onFocus={() => (active.value = row.id)}
      onClick={(event) => {
        if (!(event.target as Element).closest("a, button") && !getSelection()?.toString()) go("/rollouts", row.id);
      }}
    >
      <span role="cell" class="state">
        <span class={`chip ${TONES[row.state]}`} title={row.message}>
          {stateText(row)}
        </span>
      </span>
      <span role="cell" class="name">
        <a href={href("/rollouts", row.id)} tabIndex={-1} class="mono" title={row.id} aria-label={rolloutName(row)}>
          <bdi>{shortName(row)}</bdi>
        </a>
        {row.namespace !== DEFAULT_NAMESPACE && (
          <span class="muted">
            {" "}
            in <bdi>{row.namespace}</bdi>
          </span>
        )}
        {drivers.value.length > 1 && row.driver && (
          <span class="muted">
            {" "}
            at <bdi>{row.driver}</bdi>
          </span>
        )}
        {row.attempts > 1 && <span class="muted"> attempt {row.attempts}</span>}
      </span>
      <span role="cell" class="task" title={row.task}>
        <bdi>{row.task}</bdi>
      </span>
      <span role="cell" class="agent">
        <bdi>{row.agent}</bdi>
      </span>
      <span role="cell" class="right num version">{row.versions ? versionText(row.versions) : <span class="muted">–</span>}</span>
      <span role="cell" class="right num calls">{plain(row.calls)}</span>
      <span role="cell" class="right num tokens" title={`${plain(row.promptTokens)} prompt, ${plain(row.sampledTokens)} sampled`}>
        {compact(row.sampledTokens)}
      </span>
      <span role="cell" class="right num reward">
        {row.reward === null ? <span class="muted">–</span> : reward(row.reward)}
      </span>
      <span role="cell" class="right num time">{row.ended === null ? <Elapsed since={row.created} /> : duration(row.ended - row.created)}</span>
      <span role="cell" class="act">
        {row.ended === null && (
          <button type="button" class="button quiet" tabIndex={-1} aria-label={`Cancel ${rolloutName(row)}`} onClick={() => askToCancel("rollout", row.id)}>
            Cancel
          </button>
        )}
      </span>
    </div>
  );
}

function Elapsed({ since }: { since: number }) {
  return <>{duration(Math.max(0, now.value - since))}</>;
}

function stateText(row: Row): string {
  if (row.state === "failed") return `failed: ${row.cause}`;
  if (row.paused) return `paused, ${PHASE_NAMES[row.phase]}`;
  if (row.state === "running") return PHASE_NAMES[row.phase];
  return row.state;
}

function versionText([oldest, newest]: readonly [number, number]): string {
  return oldest === newest ? String(newest) : `${oldest}–${newest}`;
}
