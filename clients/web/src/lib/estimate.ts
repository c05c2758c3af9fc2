// Shares and means with 95 % intervals that hold with few observations, as `penstock.evaluation.statistics` computes them:
// E. B. Wilson's interval (JASA 22, 1927), with tasks as clusters.

/** A mean with its 95 % interval. */
export interface Estimate {
  readonly value: number;
  readonly low: number;
  readonly high: number;
  /** Observations. */
  readonly count: number;
}

const Z = 1.959963984540054;
/** Values around 1 that differ by no more are equal: so much is lost in means and differences. */
const ROUNDING = 64 * Number.EPSILON;

/** The sum without what additions one by one lose (A. Neumaier). */
function sum(values: readonly number[]): number {
  let total = 0;
  let lost = 0;
  for (const value of values) {
    const next = total + value;
    lost += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
    total = next;
  }
  return total + lost;
}

/** The mean of at least one. */
export const mean = (values: readonly number[]): number => sum(values) / values.length;
const clamped = (share: number): number => Math.min(Math.max(share, 0), 1);

/** Wilson's interval of a share, 0 to 1, of more than 0 observations (not necessarily a whole number). */
export function wilson(share: number, observations: number): readonly [number, number] {
  const square = (Z * Z) / observations;
  const centre = (share + square / 2) / (1 + square);
  const half = (Z / (1 + square)) * Math.sqrt((share * (1 - share)) / observations + square / (4 * observations));
  // With none or all the bound is exact; rounding must not change it.
  return [share === 0 ? 0 : Math.max(0, centre - half), share === 1 ? 1 : Math.min(1, centre + half)];
}

/** What share `part` is of `whole`; null where there is nothing. */
export function shareOf(part: number, whole: number): Estimate | null {
  if (whole <= 0) return null;
  const [low, high] = wilson(part / whole, whole);
  return { value: part / whole, low, high, count: whole };
}

/**
 * The mean over tasks of their mean rewards, within the range of rewards.
 *
 * Attempts at one task are not independent, so the variance is that between tasks; where all tasks agree, each counts once.
 * With one task the interval is over its attempts.
 *
 * @param rewards by task; tasks without one are left out.
 * @param range the least and the most that a reward can be.
 */
export function boundedMean(rewards: ReadonlyMap<string, readonly number[]>, range: readonly [number, number]): Estimate | null {
  const counted = [...rewards.values()].filter((values) => values.length > 0);
  if (!counted.length) return null;
  let [least, most] = range;
  let count = 0;
  for (const values of counted) {
    count += values.length;
    for (const value of values) {
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  }
  const means = counted.map(mean);
  const value = mean(means);
  if (most === least) return { value, low: least, high: most, count };
  const span = most - least;
  const shares = means.map((one) => (one - least) / span);
  const over = clamped(mean(shares));
  const rounding = ROUNDING * Math.max(1, Math.max(Math.abs(least), Math.abs(most)) / span);
  const [low, high] = shares.length === 1 ? wilson(over, count) : betweenTasks(shares, over, count, rounding);
  return { value, low: Math.min(value, Math.max(least, least + low * span)), high: Math.max(value, Math.min(most, least + high * span)), count };
}

function betweenTasks(shares: readonly number[], over: number, attempts: number, rounding: number): readonly [number, number] {
  let [least, most] = [Infinity, -Infinity];
  for (const share of shares) [least, most] = [Math.min(least, share), Math.max(most, share)];
  if (most - least <= rounding) return wilson(over, shares.length);
  const variance = sum(shares.map((share) => (share - over) ** 2)) / (shares.length - 1) / shares.length;
  const spread = over * (1 - over);
  // At most the attempts: a variance that is small by chance adds no evidence.
  return wilson(over, spread <= 0 || variance <= 0 ? shares.length : Math.min(spread / variance, attempts));
}

/** The mean of unbounded values with its normal interval, which has no width where they do not vary; null without any. */
export function normalMean(values: readonly number[]): Estimate | null {
  if (!values.length) return null;
  const value = mean(values);
  const variance = values.length > 1 ? sum(values.map((one) => (one - value) ** 2)) / (values.length - 1) : 0;
  const half = Z * Math.sqrt(variance / values.length);
  return { value, low: value - half, high: value + half, count: values.length };
}

/** The middle value; null without any. */
export function median(values: readonly number[]): number | null {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const upper = sorted[middle] ?? 0;
  return sorted.length % 2 ? upper : ((sorted[middle - 1] ?? 0) + upper) / 2;
}

/**
 * How much the mean of `b` is above that of `a`, with its interval from theirs (R. G. Newcombe, 1998: it stays within the
 * bounds of Wilson's intervals).
 */
export function difference(a: Estimate, b: Estimate): Estimate {
  const value = b.value - a.value;
  return {
    value,
    low: value - Math.hypot(b.value - b.low, a.high - a.value),
    high: value + Math.hypot(b.high - b.value, a.value - a.low),
    count: Math.min(a.count, b.count),
  };
}
