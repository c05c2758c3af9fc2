/**
 * How likely a sampled token was, as a colour.
 *
 * Nine steps of surprise (-logprob, in nats). The steps differ in lightness first and keep to the yellow to red-orange
 * side, where lightness falls with every step: they stay apart for people who see no red or no green and in a print
 * without colours. Certain tokens have no background at all, so that a page of them is quiet; from the seventh step on
 * there is an underline as well. Invariant (tested): text on each of them has a contrast of 4.5 at least, in both themes,
 * and neighbouring steps differ.
 */

/** Upper bounds of the steps, in nats: 0.01 is p = 0.99, 0.7 is p = 0.5, 4.6 is p = 0.01. */
export const BOUNDS: readonly number[] = [0.01, 0.1, 0.3, 0.7, 1.2, 2.3, 4.6, 6.9];
export const STEPS = BOUNDS.length + 1;

/** A colour in OKLCH: lightness 0 to 1, chroma, hue in degrees. */
export interface Oklch {
  readonly l: number;
  readonly c: number;
  readonly h: number;
}

/** The step of a logprob, 0 (certain) to STEPS - 1. */
export function stepOf(logprob: number): number {
  const surprise = -logprob;
  let step = 0;
  for (const bound of BOUNDS) {
    if (!(surprise > bound)) break;
    step += 1;
  }
  return step;
}

/** What a step means, for its entry in the legend. */
export function stepLabel(step: number): string {
  const percent = (bound: number): string => {
    const share = Math.exp(-bound) * 100;
    return share >= 10 ? `${Math.round(share)} %` : `${Number(share.toPrecision(1))} %`;
  };
  if (step === 0) return `${percent(BOUNDS[0] ?? 0)} or more`;
  if (step >= BOUNDS.length) return `under ${percent(BOUNDS[BOUNDS.length - 1] ?? 0)}`;
  return `${percent(BOUNDS[step] ?? 0)} to ${percent(BOUNDS[step - 1] ?? 0)}`;
}

/** The background of a step from 1 on; step 0 has none. */
export function background(step: number, theme: "light" | "dark"): Oklch {
  const share = (step - 1) / (STEPS - 2);
  const h = 98 - 58 * share;
  return theme === "light"
    ? { l: 0.96 - 0.28 * share, c: 0.045 + 0.125 * share, h }
    : { l: 0.27 + 0.21 * share, c: 0.03 + 0.105 * share, h };
}

/** A colour as CSS writes it. */
export function css(colour: Oklch): string {
  return `oklch(${colour.l.toFixed(3)} ${colour.c.toFixed(3)} ${colour.h.toFixed(1)})`;
}

/** Linear sRGB, each 0 to 1: what contrast is reckoned from. Conversion by Ottosson, "A perceptual color space" (2020). */
export function linear(colour: Oklch): readonly [number, number, number] {
  const angle = (colour.h * Math.PI) / 180;
  const a = colour.c * Math.cos(angle);
  const b = colour.c * Math.sin(angle);
  const long = (colour.l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const middle = (colour.l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (colour.l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const clip = (value: number): number => Math.min(1, Math.max(0, value));
  return [
    clip(4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short),
    clip(-1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short),
    clip(-0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short),
  ];
}

/** WCAG's relative luminance. */
export function luminance(colour: Oklch): number {
  const [red, green, blue] = linear(colour);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
