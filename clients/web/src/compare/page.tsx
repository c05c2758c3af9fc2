/** A group's page: its siblings beside each other, what set their rewards apart, and where two of them part. */

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { useEffect, useMemo } from "preact/hooks";
import { Phase, type RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";
import { href, type Params, setQuery } from "../lib/router";
import { type Key, useKeys } from "../lib/keys";
import { askToCancel, CancelSheet } from "../ui/cancel";
import { CopyId } from "../ui/copyid";
import { groupName } from "../ui/name";
import { FollowingNotice } from "../ui/notice";
import { oneLine } from "../rollout/safe";
import { Inspector } from "../rollout/tokenview";
import { counted, durationWords, figure } from "../rollout/words";
import "../rollout/rollout.css";
import "./compare.css";
import { End } from "./end";
import { followGroup, type GroupModel } from "./model";
import { type Compared, SideBySide } from "./sidebyside";
import { RewardStrip } from "./strip";
import { advantage, bestAndWorst, groupTone, rewardOf, spread, type Spread } from "./spread";

export default function Page({ params, query }: { params: Params; query: URLSearchParams }) {
  const id = params["id"] ?? "";
  const model = useMemo(() => followGroup(id), [id]);
  useEffect(() => () => model.stop(), [model]);
  const group = model.group.value;
  if (model.isUnknown.value && !group) {
    return (
      <div class="empty" role="alert">
        <h1>There is no group {oneLine(id, 60)}</h1>
        <p>It was deleted, its address is not complete, or it belongs to other services than these.</p>
        <p>
          <a href={href("/")}>All rollouts</a>
        </p>
      </div>
    );
  }
  if (!group) return <FollowingNotice following={model.following} />;
  return <Known model={model} query={query} />;
}

function Known({ model, query }: { model: GroupModel; query: URLSearchParams }) {
  const group = model.group.value;
  const rollouts = model.rollouts.value;
  const rewards = rollouts.flatMap((rollout) => rewardOf(rollout) ?? []);
  const figures = spread(rewards);
  const chosen = pair(query, rollouts);
  const [left, right] = (chosen ?? []).map((id) => find(rollouts, id));
  const ended = rollouts.filter((rollout) => rollout.phase === Phase.ENDED).length;
  const keys = useMemo<readonly Key[]>(() => [{ key: "c", does: "cancel the group", run: () => cancel(model) }], [model]);
  useKeys(keys);
  if (!group) return null;
  return (
    <div class="group">
      <FollowingNotice following={model.following} />
      <header class="rollout-title">
        <h1>
          <span class="muted">Group</span> <bdi title={model.id}>{groupName({ id: model.id, task: group.spec?.task?.taskId ?? "", agent: group.spec?.agent?.name ?? "" })}</bdi>
        </h1>
        <CopyId id={model.id} />
        <span class={`chip ${groupTone(rollouts)}`}>
          {ended} of {rollouts.length} ended
        </span>
        <span class="grow" />
        {ended < rollouts.length && (
          <button type="button" class="button danger" onClick={() => askToCancel("group", model.id)}>
            Cancel group
          </button>
        )}
      </header>
      <div class="group-top">
        <section class="card panel" aria-label="Rewards">
          <h2>Rewards</h2>
          <RewardStrip rollouts={rollouts} chosen={chosen} onChoose={(rollout) => choose(chosen, "right", rollout.rolloutId)} />
          <SpreadWords figures={figures} total={rollouts.length} />
        </section>
        <section class="card panel" aria-label="Task">
          <h2>Task</h2>
          <p>
            <code>{oneLine(group.spec?.task?.taskId ?? "", 80)}</code> by {oneLine(group.spec?.agent?.name ?? "", 60)}
          </p>
          <p class="muted">{oneLine(group.spec?.task?.instruction ?? "", 280)}</p>
          <p class="muted num">
            {counted(group.size, "result")} wanted{group.spares > 0 && `, ${counted(group.spares, "spare")}`}
            {group.quorum !== group.size && `, quorum ${group.quorum}`}
          </p>
        </section>
      </div>
      <SiblingTable rollouts={rollouts} figures={figures} chosen={chosen} />
      {left && right && <SideBySide key={`${left.rolloutId} ${right.rolloutId}`} left={comparedOf(left)} right={comparedOf(right)} label="Two siblings side by side" />}
      <Inspector />
      <CancelSheet />
    </div>
  );
}

function cancel(model: GroupModel): void {
  if (model.rollouts.peek().some((rollout) => rollout.phase !== Phase.ENDED)) askToCancel("group", model.id);
}

type Pair = readonly [string, string];
const find = (rollouts: readonly RolloutSummary[], id: string): RolloutSummary | undefined => rollouts.find((rollout) => rollout.rolloutId === id);

/** What is compared: what the address says, else the best and the worst. */
function pair(query: URLSearchParams, rollouts: readonly RolloutSummary[]): Pair | undefined {
  const usual = bestAndWorst(rollouts);
  const known = (id: string | null): string | undefined => (id === null ? undefined : find(rollouts, id)?.rolloutId);
  const left = known(query.get("left"));
  const right = known(query.get("right"));
  if (left !== undefined && right !== undefined && left !== right) return [left, right];
  if (!usual) return undefined;
  const other = left ?? right;
  if (other === undefined) return usual;
  return [other, usual[0] === other ? usual[1] : usual[0]];
}

function choose(chosen: Pair | undefined, side: "left" | "right", id: string): void {
  const [left, right] = chosen ?? [id, id];
  const next = side === "left" ? [id, id === right ? left : right] : [id === left ? right : left, id];
  setQuery(new URLSearchParams({ left: next[0] ?? "", right: next[1] ?? "" }));
}

function SpreadWords({ figures, total }: { figures: Spread | undefined; total: number }) {
  if (!figures) return <p class="muted">No reward yet.</p>;
  return (
    <>
      <p class="num">
        mean <strong>{figure(figures.mean)}</strong>, deviation {figure(figures.deviation)}, from {figure(figures.least)} to {figure(figures.most)}; {figures.count} of {total} graded
      </p>
      {figures.count > 1 && figures.deviation <= 1e-9 && (
        <p class="muted">All rewards are equal: with advantages over the group's mean there is nothing to learn from it.</p>
      )}
    </>
  );
}

function SiblingTable({ rollouts, figures, chosen }: { rollouts: readonly RolloutSummary[]; figures: Spread | undefined; chosen: Pair | undefined }) {
  return (
    <div class="card siblings-table">
      <table>
        <thead>
          <tr>
            <th>#</th>
            <th>State</th>
            <th class="right">Reward</th>
            <th class="right wide" title="how far from the group's mean, in deviations">
              Advantage
            </th>
            <th class="right wide">Calls</th>
            <th class="right wide">Sampled</th>
            <th class="right wide">Took</th>
            <th>Compare</th>
          </tr>
        </thead>
        <tbody>
          {rollouts.map((rollout) => (
            <SiblingRow key={rollout.rolloutId} rollout={rollout} figures={figures} chosen={chosen} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function SiblingRow({ rollout, figures, chosen }: { rollout: RolloutSummary; figures: Spread | undefined; chosen: Pair | undefined }) {
  const reward = rewardOf(rollout);
  // Rewards that are all equal are all at the mean.
  const gain = reward === undefined || !figures ? undefined : (advantage(reward, figures) ?? 0);
  const took = rollout.createTime && rollout.endTime ? durationWords((timestampMs(rollout.endTime) - timestampMs(rollout.createTime)) / 1000) : "";
  const name = `rollout ${rollout.index}`;
  return (
    <tr>
      <td>
        <a href={href("/rollouts", rollout.rolloutId)} aria-label={name}>
          {rollout.index}
        </a>
      </td>
      <td>
        <End rollout={rollout} />
      </td>
      <td class="right num">{reward === undefined ? <span class="muted">–</span> : <strong>{figure(reward)}</strong>}</td>
      <td class="right num muted wide">{gain === undefined ? "–" : `${gain > 0 ? "+" : ""}${gain.toFixed(2)}`}</td>
      <td class="right num wide">{(rollout.calls?.calls ?? 0).toLocaleString("en")}</td>
      <td class="right num wide">{Number(rollout.calls?.completionTokens ?? 0).toLocaleString("en")}</td>
      <td class="right num wide">{took}</td>
      <td>
        <span class="picks">
          {(["left", "right"] as const).map((side, index) => (
            <button key={side} type="button" class="pick" aria-pressed={chosen?.[index] === rollout.rolloutId} onClick={() => choose(chosen, side, rollout.rolloutId)} aria-label={`Put ${name} on the ${side}`}>
              {side}
            </button>
          ))}
        </span>
      </td>
    </tr>
  );
}

/** A sibling as it is put beside another. */
function comparedOf(rollout: RolloutSummary): Compared {
  const reward = rewardOf(rollout);
  const isEnded = rollout.phase === Phase.ENDED;
  return {
    ...{ id: rollout.rolloutId, name: `Rollout ${rollout.index}`, isEnded, calls: rollout.calls?.calls ?? 0 },
    facts: (
      <>
        <End rollout={rollout} />
        <span class="side-reward num">{reward === undefined ? (isEnded ? "not graded" : "not yet") : figure(reward)}</span>
      </>
    ),
  };
}
