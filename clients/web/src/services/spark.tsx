// A small curve of the last samples.

/** Samples kept for a curve. */
export const KEPT = 120;

/** With one more sample, the oldest left out. */
export function pushed(values: readonly number[], value: number): readonly number[] {
  return [...values.slice(1 - KEPT), value];
}

/** How much a counter grew a second, between two readings; null for the first, and after a restart. */
export function rate(before: readonly [number, number] | null, now: readonly [number, number]): number | null {
  if (!before || now[0] <= before[0] || now[1] < before[1]) return null;
  return ((now[1] - before[1]) * 1000) / (now[0] - before[0]);
}

export function Spark({ values, label }: { values: readonly number[]; label: string }) {
  const most = Math.max(1e-9, ...values);
  const x = (index: number) => (160 * (KEPT - values.length + index)) / (KEPT - 1);
  const y = (value: number) => 34 - (30 * value) / most;
  const line = values.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)},${y(value).toFixed(1)}`).join("");
  return (
    <svg class="spark" viewBox="0 0 160 36" preserveAspectRatio="none" role="img" aria-label={label}>
      <line class="rule" x1="0" x2="160" y1="34" y2="34" />
      {values.length > 1 && (
        <>
          <path class="area" d={`${line}L160,36L${x(0).toFixed(1)},36Z`} />
          <path class="stroke" d={line} />
        </>
      )}
    </svg>
  );
}
