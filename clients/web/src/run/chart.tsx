// Lines with their bands, of one or several runs, in one picture.
import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";

import { ticks, useWidth } from "../ui/plot";
import type { LinePoint } from "./model";

const EDGE = { left: 52, right: 12, top: 10, bottom: 22 };

export interface Line {
  readonly name: string;
  /** 0 to 3: its colour and its dashes. */
  readonly look: number;
  readonly points: readonly LinePoint[];
}

interface Props {
  readonly title: string;
  readonly lines: readonly Line[];
  readonly format: (value: number) => string;
  /** What the horizontal axis is. */
  readonly axis: string;
  /** What the band is; empty = there is none. */
  readonly band: string;
  /** What is always in the picture, from the least to the most; null = what the lines have. */
  readonly range: readonly [number, number] | null;
  readonly height: number;
  /** Shows what a point is made of; without it that is nothing more. */
  readonly onOpen?: (line: number, point: LinePoint) => void;
  /** What else is known of a point's own rollouts; empty = nothing. */
  readonly detail?: (point: LinePoint) => string;
  /** Above the picture: what it is chosen by. */
  readonly children?: ComponentChildren;
}

export function Chart({ title, lines, format, axis, band, range, height, onOpen, detail, children }: Props) {
  const { box, width } = useWidth();
  const picked = useSignal<number | null>(null);
  const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
  const [first = 0, last = 0] = [xs[0], xs.at(-1)];
  let [low, high] = range ?? [Infinity, -Infinity];
  for (const { points } of lines)
    for (const { mean, own } of points) {
      low = Math.min(low, band ? mean.low : mean.value, own);
      high = Math.max(high, band ? mean.high : mean.value, own);
    }
  if (high <= low) [low, high] = range ? [low, low + 1] : around(low);
  const inner = width.value - EDGE.left - EDGE.right;
  const x = (value: number) => EDGE.left + (last > first ? (inner * (value - first)) / (last - first) : inner / 2);
  const y = (value: number) => EDGE.top + (height - EDGE.top - EDGE.bottom) * (1 - (value - low) / (high - low));
  const at = picked.value === null ? undefined : xs[Math.min(picked.value, xs.length - 1)];
  const found = at === undefined ? [] : lines.flatMap((line, index) => line.points.flatMap((point) => (point.x === at ? [{ line, index, point }] : [])));

  const pick = (clientX: number, target: Element) => {
    const left = clientX - target.getBoundingClientRect().left;
    let best = 0;
    xs.forEach((value, index) => {
      if (Math.abs(x(value) - left) < Math.abs(x(xs[best] ?? 0) - left)) best = index;
    });
    picked.value = best;
  };
  const open = () => {
    const one = found[0];
    if (one) onOpen?.(one.index, one.point);
  };
  const step = (by: number) => {
    const from = picked.peek() ?? (by > 0 ? -1 : xs.length);
    picked.value = Math.max(0, Math.min(xs.length - 1, from + by));
  };

  return (
    <section class="card chart" aria-label={title}>
      <header>
        <h3>{title}</h3>
        <p class="muted num">{at === undefined ? band : <Reading axis={axis} at={at} found={found} format={format} isNamed={lines.length > 1} detail={detail} />}</p>
      </header>
      {children}
      <div ref={box} class="plot">
        {xs.length === 0 ? (
          <p class="muted none" style={{ height: `${height}px` }}>
            No rollout has it yet.
          </p>
        ) : (
          <svg
            width={width.value}
            height={height}
            role="img"
            tabIndex={0}
            aria-label={`${title}, ${first} to ${last}: ${lines.map(({ name, points }) => `${name} ${ends(points, format)}`).join("; ")}. Arrow keys pick a point${onOpen ? ", Enter shows its rollouts" : ""}.`}
            class={onOpen ? "opens" : ""}
            onPointerMove={(event) => pick(event.clientX, event.currentTarget)}
            onPointerLeave={() => (picked.value = null)}
            onBlur={() => (picked.value = null)}
            onClick={open}
            onKeyDown={(event) => {
              const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
              if (by) {
                event.preventDefault();
                step(by);
              }
              if (event.key === "Enter") open();
            }}
          >
            {ticks(low, high).map((value) => (
              <g key={value}>
                <line x1={EDGE.left} x2={width.value - EDGE.right} y1={y(value)} y2={y(value)} class="grid" />
                <text x={EDGE.left - 7} y={y(value) + 4} class="tick" text-anchor="end">
                  {format(value)}
                </text>
              </g>
            ))}
            {lines.map(({ name, look, points }) => (
              <g key={name} class={`look-${look}`}>
                {band && points.length > 1 && <path class="band" d={bandPath(points, x, y)} />}
                {points.map((point) => (
                  <circle key={point.x} cx={x(point.x)} cy={y(point.own)} r="2" class="dot" />
                ))}
                <path class="line" d={points.map((point, index) => `${index ? "L" : "M"}${x(point.x)},${y(point.mean.value)}`).join("")} />
                {points.length === 1 && points[0] && (
                  <>
                    {band && <line x1={x(points[0].x)} x2={x(points[0].x)} y1={y(points[0].mean.low)} y2={y(points[0].mean.high)} class="line" />}
                    <circle cx={x(points[0].x)} cy={y(points[0].mean.value)} r="4" class="end" />
                  </>
                )}
              </g>
            ))}
            {at !== undefined && <line x1={x(at)} x2={x(at)} y1={EDGE.top} y2={height - EDGE.bottom} class="cursor" />}
            {found.map(({ line, point }) => (
              <g key={line.name} class={`look-${line.look}`}>
                <circle cx={x(point.x)} cy={y(point.mean.value)} r="4" class="end" />
              </g>
            ))}
            <text x={EDGE.left} y={height - 5} class="tick">
              {axis} {first}
            </text>
            {last > first && (
              <text x={width.value - EDGE.right} y={height - 5} class="tick" text-anchor="end">
                {last}
              </text>
            )}
          </svg>
        )}
      </div>
    </section>
  );
}

/** A level line is drawn in the middle. */
function around(value: number): [number, number] {
  const half = Math.abs(value) / 10 || 1;
  return [value - half, value + half];
}

function bandPath(points: readonly LinePoint[], x: (value: number) => number, y: (value: number) => number): string {
  const upper = points.map((point, index) => `${index ? "L" : "M"}${x(point.x)},${y(point.mean.high)}`).join("");
  return `${upper}${points.map((point) => `L${x(point.x)},${y(point.mean.low)}`).reverse().join("")}Z`;
}

function ends(points: readonly LinePoint[], format: (value: number) => string): string {
  const [first, last] = [points[0], points.at(-1)];
  return first && last ? `from ${format(first.mean.value)} to ${format(last.mean.value)}` : "has none";
}

interface ReadingProps {
  readonly axis: string;
  readonly at: number;
  readonly found: readonly { readonly line: Line; readonly point: LinePoint }[];
  readonly format: (value: number) => string;
  readonly isNamed: boolean;
  readonly detail: ((point: LinePoint) => string) | undefined;
}

/** What the lines are where the pointer is. */
function Reading({ axis, at, found, format, isNamed, detail }: ReadingProps) {
  return (
    <>
      {axis} {at}:
      {found.map(({ line, point, point: { mean } }) => (
        <span key={line.name} class={`reading look-${line.look}`}>
          {" "}
          {isNamed && <Swatch look={line.look} />}
          <strong>{format(mean.value)}</strong>
          {mean.high > mean.low && ` (${format(mean.low)} to ${format(mean.high)})`}, n = {mean.count}
          <Detail words={detail?.(point) ?? ""} />
        </span>
      ))}
    </>
  );
}

const Detail = ({ words }: { words: string }) => (words ? <small class="detail"> {words}</small> : null);

/** A piece of a line in its colour and dashes. */
export function Swatch({ look }: { look: number }) {
  return (
    <svg class={`swatch look-${look}`} width="26" height="10" aria-hidden="true">
      <line x1="1" x2="25" y1="5" y2="5" class="line" />
    </svg>
  );
}
