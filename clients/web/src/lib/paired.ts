// Two sets of rewards of the same tasks, compared task by task: the exact paired permutation test of `penstock eval diff`
// (`penstock.evaluation.permutation`; R. A. Fisher, "The Design of Experiments", 1935, section 21), and the normal interval of the
// mean difference (`penstock.evaluation.compare`). Differences in difficulty between tasks cancel out.

/** Additions of the table of sums: some tenths of a second. */
const MOST_STEPS = 100_000_000;
/** Rewards with at most so many digits behind the point are added without rounding. */
const MOST_DIGITS = 4;
/** A greater common denominator of the numbers of attempts makes numbers that are not whole. */
const MOST_DENOMINATOR = 1_000_000;
/** Steps into which the greatest difference is divided where differences have too little in common. */
const [MOST_LEVELS, FEWEST_LEVELS] = [1000, 10];
const Z = 1.959963984540054;

export interface Paired {
  /** The mean over tasks of how much more the second earned. */
  readonly value: number;
  /** Its 95 % interval; null where the tasks show no variance. */
  readonly interval: readonly [number, number] | null;
  /** Probability of a mean difference at least as large if each task's had either sign by chance; null = too many tasks. */
  readonly p: number | null;
  /** Tasks with a reward in both. */
  readonly tasks: number;
}

/**
 * How much more the second earned, over the tasks that both have a reward of; null where those are fewer than two.
 *
 * @param span of the rewards: no difference is greater.
 */
export function pairedDifference(first: ReadonlyMap<string, readonly number[]>, second: ReadonlyMap<string, readonly number[]>, span: number): Paired | null {
  const pairs = [...first].flatMap(([task, left]) => {
    const right = second.get(task) ?? [];
    return left.length && right.length ? [[left, right] as const] : [];
  });
  if (pairs.length < 2) return null;
  const differences = pairs.map(([left, right]) => mean(right) - mean(left));
  const exact = wholeDifferences(pairs);
  const sizes = exact && isFeasible(exact) ? exact : levels(differences);
  // Equal numbers give an equal sum, in whatever order they are added.
  const value = exact ? exact.reduce((sum, one) => sum + one, 0) / exact.length / exact.scale : mean(differences);
  const variance = isLevel(differences) ? 0 : differences.reduce((sum, one) => sum + (one - value) ** 2, 0) / (differences.length - 1);
  const half = Z * Math.sqrt(variance / differences.length);
  const interval = variance > 0 ? ([Math.max(-span, value - half), Math.min(span, value + half)] as const) : null;
  return { value, interval, p: sizes && signFlips(sizes), tasks: pairs.length };
}

const mean = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length;
const isLevel = (values: readonly number[]): boolean => Math.max(...values) - Math.min(...values) <= 64 * Number.EPSILON * Math.max(1, ...values.map(Math.abs));

/**
 * The share of all assignments of signs whose sum is at least as far from 0 as that of some differences; 1 without any.
 *
 * @param differences whole numbers, so that equal sums are found equal.
 */
export function signFlips(differences: readonly number[]): number {
  const sizes = reduced(differences);
  if (!sizes.length) return 1;
  const observed = Math.abs(sizes.reduce((sum, size) => sum + size, 0));
  const whole = sizes.reduce((sum, size) => sum + Math.abs(size), 0);
  // Probability of each sum of those that get a plus; the sum of all is twice that, less the whole.
  const found = new Float64Array(whole + 1);
  found[0] = 1;
  let reach = 0;
  for (const signed of sizes) {
    const size = Math.abs(signed);
    reach += size;
    for (let at = reach; at >= 0; at -= 1) found[at] = 0.5 * ((found[at] ?? 0) + (at >= size ? (found[at - size] ?? 0) : 0));
  }
  let extreme = 0;
  found.forEach((probability, plus) => {
    if (Math.abs(2 * plus - whole) >= observed) extreme += probability;
  });
  return Math.min(1, extreme);
}

/** Those that are not 0, over what they have in common. */
function reduced(differences: readonly number[]): number[] {
  const counted = differences.filter((one) => one !== 0);
  const common = counted.reduce((found, one) => divisor(found, Math.abs(one)), 0);
  return counted.map((one) => one / common);
}

function divisor(a: number, b: number): number {
  while (b) [a, b] = [b, a % b];
  return a;
}

function isFeasible(differences: readonly number[]): boolean {
  const sizes = reduced(differences);
  return sizes.length * sizes.reduce((sum, size) => sum + Math.abs(size), 0) <= MOST_STEPS;
}

interface Whole extends ReadonlyArray<number> {
  /** What a difference of 1 is. */
  readonly scale: number;
}

/** Differences of the means as whole numbers of a common unit, without rounding; null where they have none that is large enough. */
function wholeDifferences(pairs: readonly (readonly [readonly number[], readonly number[]])[]): Whole | null {
  const digits = digitsOf(pairs.flatMap(([left, right]) => [...left, ...right]));
  if (digits === null) return null;
  const unit = 10 ** digits;
  let denominator = 1;
  for (const [left, right] of pairs)
    for (const { length } of [left, right]) {
      denominator = (denominator / divisor(denominator, length)) * length;
      if (denominator > MOST_DENOMINATOR) return null;
    }
  const total = (values: readonly number[]) => values.reduce((sum, value) => sum + Math.round(value * unit), 0) * (denominator / values.length);
  const found = pairs.map(([left, right]) => total(right) - total(left));
  if (!found.every(Number.isSafeInteger)) return null;
  return Object.assign(found, { scale: unit * denominator });
}

/** The digits behind the point that all have at most; null = more than are counted. */
function digitsOf(values: readonly number[]): number | null {
  for (let digits = 0; digits <= MOST_DIGITS; digits += 1) if (values.every((value) => Number(value.toFixed(digits)) === value)) return digits;
  return null;
}

/**
 * The differences rounded to levels, as fine as the table of sums allows: the test of rounded differences is as exact, because a
 * difference and the same with the other sign are rounded to the same level. Null = too many.
 */
function levels(differences: readonly number[]): number[] | null {
  const sizes = differences.map(Math.abs);
  const most = Math.max(...sizes);
  if (most === 0) return [];
  const shares = sizes.reduce((sum, size) => sum + size / most, 0);
  const count = Math.min(MOST_LEVELS, Math.floor(MOST_STEPS / (sizes.length * (shares + 1))));
  return count < FEWEST_LEVELS ? null : differences.map((one) => Math.sign(one) * Math.round((Math.abs(one) / most) * count));
}
