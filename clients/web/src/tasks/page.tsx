// Tasks and agents, and one of either: the newest rollouts that match the filter, by task or by agent.
import { compact, duration, reward } from "../lib/format";
import { type Key, useKeys } from "../lib/keys";
import { changeQuery, href, type Params } from "../lib/router";
import { newest } from "../overview/feed";
import { misread } from "../overview/filter";
import { Count, FeedNotices, FILTER_KEY, FilterField, shown, text, useNewest } from "../overview/filterfield";
import { oneLine } from "../rollout/safe";
import { CopyId } from "../ui/copyid";
import { Figure, intervalWords, percent } from "../ui/figure";
import { ViewsButton } from "../ui/views";
import { type By, sliceOf, slicesOf, type Standing } from "./model";
import { SliceTable, StandingChip } from "./table";
import { versionsPlace } from "./versions";
import "./tasks.css";

interface Props {
  readonly params: Params;
  readonly query: URLSearchParams;
}

const KEYS: readonly Key[] = [FILTER_KEY];

export const Tasks = ({ query }: Props) => <All by="task" query={query} />;
export const Agents = ({ query }: Props) => <All by="agent" query={query} />;
export const Task = ({ params, query }: Props) => <One by="task" id={params["id"] ?? ""} query={query} />;
export const Agent = ({ params, query }: Props) => <One by="agent" id={params["id"] ?? ""} query={query} />;

const search = (): string => (text.value ? `?${new URLSearchParams({ q: text.value }).toString()}` : "");

function emptyWords(): string {
  if (!newest.complete.value) return newest.isBroken.value ? "Nothing is known of any rollout yet." : "Asking the driver…";
  return ["No rollout matches.", ...misread(text.value)].join(" ");
}

const QUICK: readonly (readonly [Standing | "", string])[] = [
  ["", "All"],
  ["always 0", "Always 0"],
  ["mixed", "Mixed"],
  ["always 1", "Always 1"],
];

function All({ by, query }: { by: By; query: URLSearchParams }) {
  useNewest();
  useKeys(KEYS);
  const all = slicesOf(shown.value, by);
  const asked = QUICK.find(([standing]) => standing === query.get("rewards"))?.[0] ?? "";
  const slices = asked ? all.filter((slice) => slice.standing === asked) : all;
  return (
    <div class="tasks">
      <h1 class="visually-hidden">{by === "task" ? "Tasks" : "Agents"}</h1>
      <FeedNotices />
      <div class="filterbar" role="search">
        <FilterField />
        {by === "task" && (
          <div class="quick" role="group" aria-label="Rewards">
            {QUICK.map(([standing, name]) => (
              <button key={name} type="button" class="button quiet" aria-pressed={standing === asked} onClick={() => changeQuery({ rewards: standing, page: "" })}>
                {name} <span class="muted num">({standing ? all.filter((slice) => slice.standing === standing).length : all.length})</span>
              </button>
            ))}
          </div>
        )}
        <Count />
        <ViewsButton />
      </div>
      <SliceTable by={by} slices={slices} query={query} search={search()} empty={all.length ? "No task is like that." : emptyWords()} />
      {newest.isFull.value && <p class="muted">Older rollouts than the newest {compact(newest.rows.value.length)} are not counted.</p>}
    </div>
  );
}

function One({ by, id, query }: { by: By; id: string; query: URLSearchParams }) {
  useNewest();
  useKeys(KEYS);
  const rows = shown.value.filter((row) => row[by] === id);
  const slice = sliceOf(id, rows, by);
  const other = by === "task" ? "agent" : "task";
  // A filter has no spaces in its values: what has some is found by its words.
  const condition = /\s/.test(id) ? id : `${by}:${id}`;
  return (
    <div class="tasks">
      <FeedNotices />
      <div class="title">
        <h1>
          <span class="muted">{by === "task" ? "Task" : "Agent"}</span> <bdi>{oneLine(id, 140)}</bdi>
        </h1>
        {by === "task" && <StandingChip standing={slice.standing} />}
        <CopyId id={id} />
        <span class="grow" />
        {by === "task" && (
          <a class="button" href={versionsPlace(id)}>
            By policy version
          </a>
        )}
        <a class="button" href={`${href("/")}?${new URLSearchParams({ q: `${text.value} ${condition}`.trim() }).toString()}`}>
          Its rollouts
        </a>
      </div>
      <dl class={newest.isBroken.value ? "figures stale" : "figures"}>
        <Figure name="Rollouts" value={compact(rows.length)} note={`${compact(slice.graded)} graded`} />
        <Figure name="Live" value={compact(slice.live)} tone={slice.live ? "busy" : ""} />
        <Figure name="Solved" value={slice.solved ? percent(slice.solved.value) : "–"} {...(slice.solved ? { note: intervalWords(slice.solved, percent) } : {})} title="95 % interval (Wilson): of a task over its rollouts, of an agent over tasks" />
        <Figure name="Mean reward" value={slice.reward ? reward(slice.reward.value) : "–"} {...(slice.reward ? { note: intervalWords(slice.reward) } : {})} />
        <Figure name="Failed" value={compact(slice.failed)} tone={slice.failed ? "bad" : ""} />
        <Figure name="Median time" value={slice.time === null ? "–" : duration(slice.time)} />
        <Figure name="Median calls" value={slice.calls === null ? "–" : compact(slice.calls)} />
        <Figure name="Median tokens" value={slice.tokens === null ? "–" : compact(slice.tokens)} />
      </dl>
      <div class="filterbar" role="search">
        <FilterField />
        <Count />
        <ViewsButton />
      </div>
      <SliceTable by={other} slices={slicesOf(rows, other)} query={query} search={search()} empty={emptyWords()} />
    </div>
  );
}
