// The newest groups, each with the spread of its rewards.
import { reward } from "../lib/format";
import { href } from "../lib/router";
import type { Group } from "./groups";

export function GroupList({ groups }: { groups: readonly Group[] }) {
  const all = groups.flatMap((group) => group.rewards);
  const low = Math.min(0, ...all);
  const high = Math.max(1, ...all);
  return (
    <section class="card grouplist" aria-labelledby="groups-title">
      <h2 id="groups-title">Newest groups</h2>
      <ul>
        <li class="axis muted num" aria-hidden="true">
          <span />
          <span />
          <span class="ends">
            <span>{reward(low)}</span>
            <span>{reward(high)}</span>
          </span>
          <span>mean ± spread</span>
        </li>
        {groups.map((group) => (
          <li key={group.id}>
            <a href={href("/groups", group.id)} title={group.id}>
              <bdi>{group.name}</bdi>
            </a>
            <span class="muted num">
              {group.ended}/{group.rows.length} ended
            </span>
            <Strip group={group} low={low} high={high} />
            <span class="num">
              {group.mean === null ? <span class="muted">no reward</span> : `${reward(group.mean)} ± ${reward(group.spread)}`}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

/** Each reward as a mark on a line from the lowest to the highest of all groups, and their mean. */
function Strip({ group, low, high }: { group: Group; low: number; high: number }) {
  const x = (value: number) => 4 + (112 * (value - low)) / (high - low || 1);
  const said = group.rewards.length
    ? `Rewards ${group.rewards.map(reward).join(", ")}`
    : "No reward yet";
  return (
    <svg class="strip" viewBox="0 0 120 16" role="img" aria-label={said}>
      <line x1="4" x2="116" y1="8" y2="8" class="rule" />
      {group.mean !== null && <line x1={x(group.min)} x2={x(group.max)} y1="8" y2="8" class="span" />}
      {group.rewards.map((value, index) => (
        <circle key={index} cx={x(value)} cy="8" r="3.2" class="dot" />
      ))}
      {group.mean !== null && <line x1={x(group.mean)} x2={x(group.mean)} y1="1.5" y2="14.5" class="mean" />}
    </svg>
  );
}
