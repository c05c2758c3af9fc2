// One figure of a row of them, and means with their intervals in words.
import type { ComponentChildren } from "preact";

import type { Estimate } from "../lib/estimate";
import { reward } from "../lib/format";

interface Props {
  readonly name: string;
  readonly value: ComponentChildren;
  /** Below the figure. */
  readonly note?: string;
  readonly tone?: string;
  readonly title?: string;
}

/** To be put into a `dl class="figures"`. */
export function Figure({ name, value, note, tone = "", title }: Props) {
  return (
    <div class={tone} title={title}>
      <dt>{name}</dt>
      <dd class="num">
        {value}
        {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

/** "0.42 to 0.71". */
export const intervalWords = ({ low, high }: Estimate, format: (value: number) => string = reward): string => `${format(low)} to ${format(high)}`;

/** A share as "42 %"; what is not quite none or all is not rounded to it. */
export function percent(share: number): string {
  const whole = Math.round(share * 100);
  if (whole === 0 && share > 0) return "<1 %";
  if (whole === 100 && share < 1) return ">99 %";
  return `${whole} %`;
}

/** A mean with its interval behind it. */
export function Mean({ of, format = reward }: { of: Estimate | null; format?: (value: number) => string }) {
  if (!of) return <span class="muted">–</span>;
  return (
    <span title={`95 % interval, over ${of.count} rollouts`}>
      <strong>{format(of.value)}</strong> <span class="muted wide">{intervalWords(of, format)}</span>
    </span>
  );
}
