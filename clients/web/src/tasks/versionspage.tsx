// A task by policy version: how often each version solves it, and rollouts of two versions side by side, token by token.
import { useEffect, useMemo } from "preact/hooks";

import { type Compared, SideBySide } from "../compare/sidebyside";
import { compact, reward } from "../lib/format";
import { changeQuery, href, type Params } from "../lib/router";
import { PHASE_NAMES, type Row } from "../overview/board";
import { Feed, MOST_ENDED } from "../overview/feed";
import { LeftOut } from "../overview/filterfield";
import { oneLine } from "../rollout/safe";
import { Inspector } from "../rollout/tokenview";
import { counted } from "../rollout/words";
import { runName } from "../run/columns";
import { refOf } from "../run/model";
import { type Column, DataTable } from "../ui/datatable";
import { Mean, percent } from "../ui/figure";
import { shortName } from "../ui/name";
import { FollowingNotice } from "../ui/notice";
import { ViewsButton } from "../ui/views";
import "./tasks.css";
import { agentOf, type Pair, pairOf, type VersionSlice, versionSlices, versionWords, withRollout, withVersion } from "./versions";

/** Rollouts of a version that are offered: the newest. */
const MOST_OFFERED = 200;
const SIDES = ["left", "right"] as const;

export default function Versions({ params, query }: { params: Params; query: URLSearchParams }) {
  const task = params["id"] ?? "";
  return <Known key={task} task={task} query={query} />;
}

function Known({ task, query }: { task: string; query: URLSearchParams }) {
  const feed = useMemo(() => new Feed(MOST_ENDED, { task }), []);
  useEffect(feed.watch, []);
  const run = query.get("run");
  const all = feed.rows.value;
  const rows = useMemo(() => all.filter((row) => row.task === task && (run === null || (row.run !== "" && refOf(row) === run))), [all, run]);
  const asked = SIDES.map((side) => query.get(side));
  const agent = agentOf(rows, query.get("agent"), asked);
  const own = useMemo(() => rows.filter((row) => row.agent === agent), [rows, agent]);
  const slices = useMemo(() => versionSlices(own), [own]);
  const isKnown = feed.complete.value;
  const pair = isKnown ? pairOf(slices, asked[0] ?? null, asked[1] ?? null) : undefined;
  const unknown = isKnown ? asked.filter((id) => id !== null && !slices.some((slice) => slice.rows.some((row) => row.id === id))) : [];
  useEffect(() => {
    // Into the address, so that it is shared as it is seen, and new rollouts do not take it from under the reader's eyes.
    if (pair && !unknown.length && asked.includes(null)) choose(pair);
  }, [pair?.[0].id, pair?.[1].id, unknown.length]);
  const left = slices.reduce((count, slice) => count - slice.rows.length, own.length);
  return (
    <div class="tasks group">
      {feed.followings.value.map(({ driver, following }) => (
        <FollowingNotice key={driver} following={following} />
      ))}
      <LeftOut />
      <Title task={task} run={run} />
      <Controls rows={rows} agent={agent} run={run} />
      {unknown.length > 0 && (
        <p class="notice" role="status">
          <span>
            <strong>Not among the rollouts shown here:</strong> {unknown.map((id) => oneLine(id ?? "", 80)).join(", ")}. It was deleted, or is of another task, run or agent, or has no policy version.
          </span>
        </p>
      )}
      <VersionTable slices={slices} pair={pair} query={query} empty={isKnown ? "No rollout with a policy version is known." : "Asking the driver…"} />
      {left > 0 && <p class="muted">{counted(left, "rollout")} without a policy version left out.</p>}
      {feed.isFull.value && <p class="muted">Older rollouts than the newest {compact(MOST_ENDED)} ended ones of each driver are not counted.</p>}
      {pair ? <Chosen slices={slices} pair={pair} /> : slices.length > 0 && isKnown && <p class="muted">There is one version only: nothing to compare.</p>}
      <Inspector />
    </div>
  );
}

function choose([left, right]: Pair): void {
  changeQuery({ left: left.id, right: right.id });
}

function Title({ task, run }: { task: string; run: string | null }) {
  return (
    <div class="title">
      <h1>
        <span class="muted">Task</span> <bdi>{oneLine(task, 140)}</bdi> <span class="muted">by policy version</span>
      </h1>
      <span class="grow" />
      <a class="button" href={href("/tasks", task)}>
        The task
      </a>
      {run !== null && (
        <a class="button" href={href("/runs", run)}>
          The run
        </a>
      )}
      <ViewsButton />
    </div>
  );
}

/** Another agent or run has other rollouts: the pair is chosen again. */
function Controls({ rows, agent, run }: { rows: readonly Row[]; agent: string; run: string | null }) {
  const agents = [...new Set(rows.map((row) => row.agent))].sort();
  if (agents.length < 2 && run === null) return null;
  return (
    <div class="filterbar">
      {agents.length > 1 && (
        <label>
          Agent{" "}
          <select class="field" value={agent} onChange={(event) => changeQuery({ agent: event.currentTarget.value, left: "", right: "", page: "" })}>
            {agents.map((one) => (
              <option key={one} value={one}>
                {oneLine(one, 60)}
              </option>
            ))}
          </select>
        </label>
      )}
      {run !== null && (
        <span>
          Run <bdi>{runName(run)}</bdi>{" "}
          <button type="button" class="button quiet" onClick={() => changeQuery({ run: "", page: "" })}>
            all runs
          </button>
        </span>
      )}
    </div>
  );
}

function VersionTable({ slices, pair, query, empty }: { slices: readonly VersionSlice[]; pair: Pair | undefined; query: URLSearchParams; empty: string }) {
  const hasRuns = new Set(slices.map(({ run }) => run)).size > 1;
  const columns: readonly Column<VersionSlice>[] = [
    { ...{ key: "version", name: "Version", title: "The policy version that a rollout began with", isNumber: true, sortBy: ({ version }) => version }, cell: ({ version }) => version },
    ...(hasRuns ? [{ key: "run", name: "Run", sortBy: ({ run }: VersionSlice) => run, cell: ({ run }: VersionSlice) => (run ? <bdi>{runName(run)}</bdi> : <span class="muted">no run</span>) }] : []),
    { ...{ key: "rollouts", name: "Rollouts", isNumber: true, sortBy: ({ rows }) => rows.length }, cell: ({ rows, graded }) => <span title={`${graded} graded`}>{compact(rows.length)}</span> },
    {
      ...{ key: "solved", name: "Solved", title: "Share of the graded rollouts with the most that a reward can be, with its 95 % interval (Wilson)", isNumber: true, sortBy: ({ solved }) => solved?.value ?? null },
      cell: ({ solved }) => <Mean of={solved} format={percent} />,
    },
    { ...{ key: "reward", name: "Mean reward", isNumber: true, isWide: true, sortBy: (slice) => slice.reward?.value ?? null }, cell: (slice) => (slice.reward ? reward(slice.reward.value) : "–") },
    {
      ...{ key: "compare", name: "Compare", title: "Puts the rollout whose reward is nearest to the version's mean on a side", sortBy: () => null },
      cell: (slice) => <Picks slice={slice} pair={pair} name={[`version ${slice.version}`, hasRuns && slice.run && `of ${runName(slice.run)}`].filter(Boolean).join(" ")} />,
    },
  ];
  return <DataTable label="Policy versions" columns={columns} rows={slices} keyOf={({ key }) => key} query={query} empty={empty} />;
}

function Picks({ slice, pair, name }: { slice: VersionSlice; pair: Pair | undefined; name: string }) {
  if (!pair) return null;
  return (
    <span class="picks">
      {SIDES.map((side, index) => (
        <button
          key={side}
          type="button"
          class="pick"
          aria-pressed={slice.rows.some((row) => row.id === pair[index as 0 | 1].id)}
          onClick={() => choose(withVersion(pair, index as 0 | 1, slice))}
          aria-label={`Put ${name} on the ${side}`}
        >
          {side}
        </button>
      ))}
    </span>
  );
}

function Chosen({ slices, pair }: { slices: readonly VersionSlice[]; pair: Pair }) {
  const [left, right] = pair;
  return (
    <>
      <div class="filterbar">
        {SIDES.map((side, index) => (
          <RolloutField key={side} side={side} chosen={pair[index as 0 | 1]} slices={slices} onChoose={(row) => choose(withRollout(pair, index as 0 | 1, row))} />
        ))}
      </div>
      <SideBySide key={`${left.id} ${right.id}`} left={comparedOf(left)} right={comparedOf(right)} label="Rollouts of two policy versions side by side" />
    </>
  );
}

function RolloutField({ side, chosen, slices, onChoose }: { side: string; chosen: Row; slices: readonly VersionSlice[]; onChoose: (row: Row) => void }) {
  const rows = slices.find((slice) => slice.rows.includes(chosen))?.rows ?? [];
  const offered = rows.slice(0, MOST_OFFERED);
  return (
    <label>
      On the {side}{" "}
      <select
        class="field"
        aria-label={`Rollout on the ${side}`}
        value={chosen.id}
        onChange={(event) => {
          const row = rows.find(({ id }) => id === event.currentTarget.value);
          if (row) onChoose(row);
        }}
      >
        {(offered.includes(chosen) ? offered : [chosen, ...offered]).map((row) => (
          <option key={row.id} value={row.id}>
            {nameOf(row)}: {row.reward === null ? row.state : `reward ${reward(row.reward)}`}
          </option>
        ))}
      </select>
    </label>
  );
}

/** How it stands, as a chip. */
function RowEnd({ row }: { row: Row }) {
  if (row.state === "completed") return <span class="chip good">completed</span>;
  if (row.state === "cancelled") return <span class="chip warn">cancelled</span>;
  if (row.state === "failed") return <span class="chip bad">{oneLine(row.reason, 40) || "failed"}</span>;
  return <span class="chip busy">{PHASE_NAMES[row.phase]}</span>;
}

const nameOf = (row: Row): string => `${shortName(row)}, ${versionWords(row)}`;

function comparedOf(row: Row): Compared {
  return {
    ...{ id: row.id, name: nameOf(row), isEnded: row.ended !== null, calls: row.calls },
    facts: (
      <>
        <RowEnd row={row} />
        <span class="side-reward num">{row.reward === null ? (row.ended === null ? "not yet" : "not graded") : reward(row.reward)}</span>
      </>
    ),
  };
}
