// A run's page: its figures, how they go on by step, and other runs in the same pictures.
import { useEffect, useMemo } from "preact/hooks";

import { compact, duration, reward } from "../lib/format";
import { changeQuery, go, href, location_, type Params, queryOf } from "../lib/router";
import { difference } from "../lib/estimate";
import type { Paired } from "../lib/paired";
import type { Row } from "../overview/board";
import { Feed, followed, MOST_DRIVERS, MOST_ENDED } from "../overview/feed";
import { LeftOut } from "../overview/filterfield";
import { oneLine } from "../rollout/safe";
import { slicesOf } from "../tasks/model";
import { SliceTable } from "../tasks/table";
import { CopyId } from "../ui/copyid";
import { type Column, DataTable } from "../ui/datatable";
import { Figure, intervalWords, Mean, percent } from "../ui/figure";
import { FollowingNotice } from "../ui/notice";
import { ViewsButton } from "../ui/views";
import { Chart, type Line, Swatch } from "./chart";
import { Ago, rate, RUN_COLUMNS, runName } from "./columns";
import { type ComparedTask, comparedTasks, pairedRuns } from "./comparison";
import { reasonLines, REASONS_BAND, reasonWords } from "./failures";
import { gapPoints, useGaps } from "./gaps";
import { MetricCharts } from "./metriccharts";
import { AXES, type Axis, filterOf, lineOf, type LinePoint, type Measure, MEASURES, parseRef, pointsOf, type Run, rowsOf, runOf, usualAxis } from "./model";
import { knownRefs, MOST_RUNS, placeOf } from "./all";
import { AXIS_NAMES, rowsPlace } from "./places";
import { SmoothField, windowOf } from "./smoothing";
import "./run.css";

/** Runs that a notice names. */
const MOST_NAMED = 10;
/** Runs that the field offers. */
const MOST_OFFERED = 100;
const NONE: readonly Row[] = [];
const HEIGHTS = { first: 260, other: 170 };

const FORMATS: Readonly<Record<string, (value: number) => string>> = { solved: percent, failed: percent, calls: round, tokens: (value) => compact(Math.round(value)), time: duration, entropy: nats, rate };
const SHARES = new Set(["reward", "solved", "failed"]);

function round(value: number): string {
  return compact(Math.round(value * 10) / 10);
}

export default function RunPage({ params, query }: { params: Params; query: URLSearchParams }) {
  const main = params["id"] ?? "";
  // Each run is one stream of each driver, of which a browser has few.
  const most = Math.max(1, Math.min(MOST_RUNS, Math.floor(MOST_DRIVERS / Math.max(1, followed.value.length))));
  const refs = [...new Set([main, ...query.getAll("with")])];
  const shownRefs = refs.slice(0, most);
  return (
    <div class="runs">
      {refs.length > most && (
        <p class="notice" role="status">
          <span>
            <strong>At most {most} of these runs can be shown in one picture.</strong> Not shown: {refs.slice(most, most + MOST_NAMED).map(runName).join(", ")}
          </span>
        </p>
      )}
      <LeftOut />
      <Shown key={shownRefs.join(" ")} refs={shownRefs} query={query} />
    </div>
  );
}

function Shown({ refs, query }: { refs: readonly string[]; query: URLSearchParams }) {
  const feeds = useMemo(() => refs.map((ref) => new Feed(MOST_ENDED, { run: parseRef(ref).id })), []);
  useEffect(() => {
    const stops = feeds.map((feed) => feed.watch());
    return () => {
      for (const stop of stops) stop();
    };
  }, []);
  const isKnown = feeds.every((feed) => feed.complete.value);
  // Once all have come: curves of thousands of rows are not computed for each part of them.
  const all = feeds.map((feed) => (isKnown ? feed.rows.value : NONE));
  const runs = useMemo(() => refs.map((ref, index) => runOf(ref, rowsOf(all[index] ?? NONE, ref))), all);
  const asked = query.get("x");
  const axis = AXES.find((one) => one === asked) ?? usualAxis(runs.map((run) => run.rows));
  const window = windowOf(query);
  const [first, second] = runs;
  if (!first) return null;
  const notices = feeds.flatMap((feed, index) => feed.followings.value.map(({ driver, following }) => <FollowingNotice key={`${driver} ${refs[index]}`} following={following} />));
  if (!isKnown)
    return (
      <>
        {notices}
        <p class="card empty">Reading the rollouts of {refs.map(runName).join(", ")}…</p>
      </>
    );
  return (
    <>
      {notices}
      <Title runs={runs} />
      {!first.rows.length && (
        <p class="notice" role="status">
          <span>
            <strong>No rollout of run {runName(first.ref)} is known.</strong> It was deleted, its id is not complete, or it belongs to other services than these. <a href={href("/runs")}>All runs</a>
          </span>
        </p>
      )}
      {runs.length === 1 ? <Figures run={first} isStale={feeds.some((feed) => feed.isBroken.value)} /> : <Overlaid runs={runs} query={query} />}
      <Controls refs={refs} query={query} axis={axis} window={window} />
      <Charts runs={runs} axis={axis} window={window} />
      <MetricCharts refs={refs} query={query} window={window} height={HEIGHTS.other} />
      {feeds.some((feed) => feed.isFull.value) && <p class="muted">Of each driver the newest {compact(MOST_ENDED)} ended rollouts of a run are shown: it may have older ones.</p>}
      <h2>Tasks</h2>
      {second ? (
        <DataTable label="Tasks of both runs" columns={TASK_COLUMNS} rows={comparedTasks(first, second)} keyOf={({ task }) => task} query={query} prefix="task-" empty="No task yet." />
      ) : (
        <SliceTable by="task" slices={slicesOf(first.rows, "task")} query={query} search={`?${new URLSearchParams({ q: filterOf(first.ref) }).toString()}`} run={first.ref} empty="No task yet." />
      )}
    </>
  );
}

function Title({ runs }: { runs: readonly Run[] }) {
  const [first] = runs;
  if (!first) return null;
  if (runs.length > 1)
    return (
      <div class="title">
        <h1>{runs.length} runs</h1>
        <ul class="legend" aria-label="Runs">
          {runs.map(({ ref }, index) => (
            <li key={ref}>
              <Swatch look={index} />
              <a href={href("/runs", ref)} title={ref}>
                <bdi>{runName(ref)}</bdi>
              </a>
              <button type="button" class="button quiet" aria-label={`Take ${runName(ref)} out of the picture`} onClick={() => without(runs, ref)}>
                ×
              </button>
            </li>
          ))}
        </ul>
        <span class="grow" />
        <ViewsButton />
      </div>
    );
  return (
    <div class="title">
      <h1>
        <span class="muted">Run</span> <bdi>{runName(first.ref)}</bdi>
      </h1>
      <span class={first.live ? "chip busy" : "chip"}>{first.live ? `${compact(first.live)} live` : "nothing runs"}</span>
      <CopyId id={first.id} />
      <span class="grow" />
      <a class="button" href={`${href("/")}?${new URLSearchParams({ q: filterOf(first.ref) }).toString()}`}>
        Its rollouts
      </a>
      <ViewsButton />
    </div>
  );
}

function without(runs: readonly Run[], ref: string): void {
  const [first = "", ...others] = runs.map((run) => run.ref).filter((one) => one !== ref);
  go(placeOf(first, others, queryOf(location_.peek())));
}

function Figures({ run, isStale }: { run: Run; isStale: boolean }) {
  const ended = run.completed + run.failed;
  return (
    <dl class={isStale ? "figures stale" : "figures"}>
      <Figure name="Rollouts" value={compact(run.rows.length)} note={`${compact(run.graded)} graded, ${compact(run.cancelled)} cancelled`} />
      <Figure name="Mean reward" value={run.reward ? reward(run.reward.value) : "–"} {...(run.reward ? { note: intervalWords(run.reward) } : {})} title="95 % interval, over tasks (Wilson)" />
      <Figure name="Solved" value={run.solved ? percent(run.solved.value) : "–"} {...(run.solved ? { note: intervalWords(run.solved, percent) } : {})} title="Of the graded rollouts, those with the most that a reward can be; 95 % interval, over tasks (Wilson)" />
      <Figure name="Failed" value={ended ? percent(run.failed / ended) : "–"} note={`${compact(run.failed)} of ${compact(ended)}`} tone={run.failed ? "bad" : ""} />
      <Figure name="A minute" value={run.perMinute === null ? "–" : rate(run.perMinute)} title="Rollouts that end in a minute, over its newest 100" />
      <Figure name="Calls" value={compact(run.calls)} note={`${compact(run.tokens)} sampled tokens`} />
      <Figure name="Policy version" value={run.versions ? run.versions[1] : "–"} {...(run.versions && run.versions[0] !== run.versions[1] ? { note: `from ${run.versions[0]}` } : {})} />
      <Figure name="Last activity" value={run.rows.length ? <Ago at={run.last} /> : "–"} {...(run.rows.length ? { note: `over ${duration(run.last - run.first)}` } : {})} />
    </dl>
  );
}

/** Several runs: their figures, and how much each is above the first. */
function Overlaid({ runs, query }: { runs: readonly Run[]; query: URLSearchParams }) {
  const columns = useMemo<readonly Column<Run>[]>(() => {
    const [first] = runs;
    const [name, ...others] = RUN_COLUMNS;
    const pairs = new Map(runs.flatMap((run) => (first && run !== first ? [[run, pairedRuns(first, run)] as const] : [])));
    const above: Column<Run> = {
      ...{ key: "above", name: "Above the first", title: "Difference of the mean rewards, with its 95 % interval (Newcombe); the runs count as independent", isNumber: true },
      sortBy: (run) => (first?.reward && run.reward && run !== first ? run.reward.value - first.reward.value : null),
      cell: (run) => (run === first ? <span class="muted">first</span> : first?.reward && run.reward ? <Mean of={difference(first.reward, run.reward)} format={signed} /> : "–"),
    };
    const paired: Column<Run> = {
      ...{ key: "paired", name: "On the same tasks", title: "Mean difference over the tasks of which both have graded rollouts, with its 95 % interval; p is of the exact paired permutation test over these tasks", isNumber: true },
      sortBy: (run) => pairs.get(run)?.value ?? null,
      cell: (run) => <PairedMean of={pairs.get(run) ?? null} />,
    };
    const isPaired = [...pairs.values()].some((one) => one !== null);
    return name ? [name, above, ...(isPaired ? [paired] : []), ...others] : [];
  }, [runs]);
  return <DataTable label="Runs" columns={columns} rows={runs} keyOf={(run) => run.ref} query={query} empty="" />;
}

/** A difference over the same tasks: "+0.12 0.03 to 0.21, p = 0.016". */
function PairedMean({ of }: { of: Paired | null }) {
  if (!of) return <span class="muted">–</span>;
  const { value, interval, p, tasks } = of;
  return (
    <span title={`Over ${tasks} tasks${interval ? "" : "; no interval: the tasks show no variance"}${p === null ? "; too many tasks for an exact test" : ""}`}>
      <strong>{signed(value)}</strong>
      {interval && <span class="muted wide"> {interval.map(signed).join(" to ")}</span>}
      {p !== null && <span class="muted">, p {chance(p)}</span>}
    </span>
  );
}

/** A probability in two digits. */
const chance = (p: number): string => (p < 0.001 ? "< 0.001" : `= ${Number(p.toPrecision(2))}`);
const signed = (value: number): string => `${value > 0 ? "+" : ""}${reward(value)}`;
const signedPercent = (value: number): string => `${value > 0 ? "+" : ""}${Math.round(value * 100)} %`;

const TASK_COLUMNS: readonly Column<ComparedTask>[] = [
  {
    ...{ key: "task", name: "Task", sortBy: ({ task }) => task },
    cell: ({ task }) => (
      <a href={href("/tasks", task)} title={task}>
        <bdi>{oneLine(task, 80)}</bdi>
      </a>
    ),
  },
  { ...{ key: "left", name: "Solved, first", isNumber: true, sortBy: ({ left }) => left?.solved?.value ?? null }, cell: ({ left }) => <Mean of={left?.solved ?? null} format={percent} /> },
  { ...{ key: "right", name: "Solved, second", isNumber: true, sortBy: ({ right }) => right?.solved?.value ?? null }, cell: ({ right }) => <Mean of={right?.solved ?? null} format={percent} /> },
  { ...{ key: "more", name: "Second above first", title: "With its 95 % interval (Newcombe)", isNumber: true, sortBy: ({ more }) => more?.value ?? null }, cell: ({ more }) => <Mean of={more} format={signedPercent} /> },
];

function Controls({ refs, query, axis, window }: { refs: readonly string[]; query: URLSearchParams; axis: Axis; window: number }) {
  const [main = "", ...others] = refs;
  const known = knownRefs.value.filter((ref) => !refs.includes(ref)).slice(0, MOST_OFFERED);
  return (
    <div class="controls">
      <label>
        By
        <select class="field" aria-label="Points by" value={axis} onChange={(event) => changeQuery({ x: event.currentTarget.value })}>
          {AXES.map((one) => (
            <option key={one} value={one}>
              {AXIS_NAMES[one]}
            </option>
          ))}
        </select>
      </label>
      <SmoothField window={window} />
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const added = String(new FormData(event.currentTarget).get("run") ?? "").trim();
          if (added && !refs.includes(added)) go(placeOf(main, [...others, added], query));
        }}
      >
        <input class="field" name="run" list="known-runs" placeholder="Run to add" aria-label="Run to add to the picture" autocomplete="off" maxLength={128} disabled={refs.length >= MOST_RUNS} />
        <datalist id="known-runs">
          {known.map((run) => (
            <option key={run} value={run} />
          ))}
        </datalist>
        <button type="submit" class="button" disabled={refs.length >= MOST_RUNS}>
          Add
        </button>
      </form>
    </div>
  );
}

function Charts({ runs, axis, window }: { runs: readonly Run[]; axis: Axis; window: number }) {
  const points = useMemo(() => runs.map((run) => pointsOf(run.rows, axis)), [runs, axis]);
  const lines = useMemo(() => {
    const linesOf = (measure: Measure): Line[] => runs.map((run, look) => ({ name: runName(run.ref), look, points: lineOf(points[look] ?? [], measure, window) }));
    return MEASURES.map((measure) => ({ measure, lines: linesOf(measure) })).filter(({ measure, lines }) => !measure.isRare || lines.some((line) => line.points.length));
  }, [points, window]);
  const reasons = useMemo(() => (points.length === 1 ? reasonLines(points[0] ?? [], window) : []), [points, window]);
  const versions = useMemo(() => widest(runs), [runs]);
  const gaps = gapPoints(useGaps(versions?.[1] ?? null).value, versions);
  const open = (line: number, point: LinePoint) => go(rowsPlace(runs[line]?.ref ?? "", axis, point));
  const [first, ...others] = lines.map(({ measure, lines }, index) => (
    <Chart
      key={measure.key}
      title={`${measure.name} by ${AXIS_NAMES[axis]}`}
      lines={lines}
      format={FORMATS[measure.key] ?? reward}
      axis={AXIS_NAMES[axis]}
      band={measure.band}
      range={[0, SHARES.has(measure.key) ? 1 : 0]}
      height={index ? HEIGHTS.other : HEIGHTS.first}
      onOpen={open}
      {...(measure.key === "failed" ? { detail: ({ rows }) => here(reasonWords(rows)) } : {})}
    />
  ));
  return (
    <>
      {first}
      <div class="charts">
        {others}
        {reasons.length > 0 && (
          <Chart
            title={`Failures by reason, by ${AXIS_NAMES[axis]}`}
            lines={reasons.map(({ name, points }, look) => ({ name: oneLine(name, 60), look, points }))}
            format={percent}
            axis={AXIS_NAMES[axis]}
            band={REASONS_BAND}
            range={[0, 0]}
            height={HEIGHTS.other}
            onOpen={(_, point) => open(0, point)}
          >
            <ul class="legend" aria-label="Reasons">
              {reasons.map(({ name }, look) => (
                <li key={name}>
                  <Swatch look={look} /> <bdi>{oneLine(name, 60)}</bdi>
                </li>
              ))}
            </ul>
          </Chart>
        )}
        {gaps.length > 0 && (
          <Chart
            title="Logprob gap by policy version"
            lines={[{ name: "engine", look: 0, points: gaps }]}
            format={nats}
            axis={AXIS_NAMES.version}
            band="mean |trainer - engine| in nats, as reported to the engine"
            range={[0, 0]}
            height={HEIGHTS.other}
            onOpen={() => go("/services")}
          />
        )}
      </div>
    </>
  );
}

/** The versions of all runs together. */
function widest(runs: readonly Run[]): readonly [number, number] | null {
  const known = runs.flatMap((run) => (run.versions ? [run.versions] : []));
  return known.length ? [Math.min(...known.map(([oldest]) => oldest)), Math.max(...known.map(([, newest]) => newest))] : null;
}

/** Of the point alone, whatever is pooled with it. */
const here = (words: string): string => words && `here: ${words}`;

/** Of any size: 3.5e-7 to some nats. */
function nats(value: number): string {
  return value !== 0 && value < 0.001 ? value.toExponential(1) : reward(value);
}
