// The reward curve: each group's rewards as dots, their range as a band, the mean as a line.
import { useSignal } from "@preact/signals";

import { reward } from "../lib/format";
import { go } from "../lib/router";
import { ticks, useWidth } from "../ui/plot";
import { type Point, smooth } from "./groups";

const HEIGHT = 190;
const EDGE = { left: 38, right: 12, top: 10, bottom: 22 };

export function Curve({ points }: { points: readonly Point[] }) {
  const { box, width } = useWidth();
  const picked = useSignal<number | null>(null);
  const low = Math.min(0, ...points.map((point) => point.min));
  const high = Math.max(low + 1e-9, 1, ...points.map((point) => point.max));
  const inner = width.value - EDGE.left - EDGE.right;
  const x = (index: number) => EDGE.left + (points.length === 1 ? inner / 2 : (inner * index) / (points.length - 1));
  const y = (value: number) => EDGE.top + (HEIGHT - EDGE.top - EDGE.bottom) * (1 - (value - low) / (high - low));
  const means = points.map((point) => point.mean);
  const line = smooth(means, points[0]?.isGroup ? 1 : Math.max(1, Math.round(points.length / 20)));
  const path = (values: readonly number[]) => values.map((value, index) => `${index ? "L" : "M"}${x(index)},${y(value)}`).join("");
  const band =
    points.length > 1
      ? `${path(points.map((point) => point.max))}${points
          .map((point, index) => `L${x(index)},${y(point.min)}`)
          .reverse()
          .join("")}Z`
      : "";
  const what = points[0]?.isGroup ? "group" : "rollout";
  const first = means[0] ?? 0;
  const last = means.at(-1) ?? 0;
  const current = picked.value === null ? null : points[Math.min(picked.value, points.length - 1)];
  const at = picked.value === null ? 0 : Math.min(picked.value, points.length - 1);

  const pick = (clientX: number, target: Element) => {
    const left = clientX - target.getBoundingClientRect().left - EDGE.left;
    picked.value = Math.max(0, Math.min(points.length - 1, Math.round((left / inner) * (points.length - 1) || 0)));
  };
  const open = () => {
    if (current) go(current.isGroup ? "/groups" : "/rollouts", current.id);
  };

  return (
    <section class="card curve" aria-labelledby="curve-title">
      <header>
        <h2 id="curve-title">Reward by {what}</h2>
        <p class="muted num" aria-live="off">
          {current ? (
            <>
              <bdi>{current.name}</bdi>: mean {reward(current.mean)}
              {current.isGroup && `, ${reward(current.min)} to ${reward(current.max)}, spread ${reward(current.spread)}`}
              {current.version !== null && `, version ${current.version}`}
            </>
          ) : (
            `${points.length} ${what}${points.length === 1 ? "" : "s"}, ${reward(first)} → ${reward(last)}`
          )}
        </p>
      </header>
      <div ref={box} class="plot">
        <svg
          width={width.value}
          height={HEIGHT}
          role="img"
          tabIndex={0}
          aria-label={`Reward of the last ${points.length} ${what}s, from ${reward(first)} to ${reward(last)}. Arrow keys pick one, Enter opens it.`}
          onPointerMove={(event) => pick(event.clientX, event.currentTarget)}
          onPointerLeave={() => (picked.value = null)}
          onClick={open}
          onBlur={() => (picked.value = null)}
          onKeyDown={(event) => {
            const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
            if (step) {
              event.preventDefault();
              const from = picked.value ?? (step > 0 ? -1 : points.length);
              picked.value = Math.max(0, Math.min(points.length - 1, from + step));
            }
            if (event.key === "Enter") open();
          }}
        >
          {ticks(low, high).map((value) => (
            <g key={value}>
              <line x1={EDGE.left} x2={width.value - EDGE.right} y1={y(value)} y2={y(value)} class="grid" />
              <text x={EDGE.left - 7} y={y(value) + 4} class="tick" text-anchor="end">
                {reward(value)}
              </text>
            </g>
          ))}
          {band && <path d={band} class="band" />}
          {points.map((point, index) => {
            const seen = new Map<number, number>();
            return point.rewards.map((value, position) => {
              const times = seen.get(value) ?? 0;
              seen.set(value, times + 1);
              return times ? null : <circle key={`${point.id} ${position}`} cx={x(index)} cy={y(value)} r="2.2" class="dot" />;
            });
          })}
          <path d={path(line)} class="line" />
          {points.length === 1 && <circle cx={x(0)} cy={y(last)} r="4" class="end" />}
          {current && (
            <>
              <line x1={x(at)} x2={x(at)} y1={EDGE.top} y2={HEIGHT - EDGE.bottom} class="cursor" />
              <circle cx={x(at)} cy={y(line[at] ?? 0)} r="4" class="end" />
            </>
          )}
          <text x={EDGE.left} y={HEIGHT - 5} class="tick">
            older
          </text>
          <text x={width.value - EDGE.right} y={HEIGHT - 5} class="tick" text-anchor="end">
            newer
          </text>
        </svg>
      </div>
    </section>
  );
}
