// How many points of a curve count together: chosen on the page, kept in the address.
import { changeQuery } from "../lib/router";

const WINDOWS = [1, 3, 5, 10, 25];
/** Points for which one more counts together where nobody has chosen. */
const POINTS_EACH = 20;

/** How many points count together, as the address has it. */
export const windowOf = (query: URLSearchParams, usual = 1): number => WINDOWS.find((one) => String(one) === query.get("smooth")) ?? usual;

/** How many are to count together where there are so many points: the more there are, the more noise. */
export const usualWindow = (points: number): number => WINDOWS.findLast((one) => one <= points / POINTS_EACH) ?? 1;

/** @param usual what the address need not have. */
export function SmoothField({ window, usual = 1 }: { window: number; usual?: number }) {
  return (
    <label title="So many points are pooled, each with those before it; the band is the interval of what is drawn">
      Smooth
      <select class="field" aria-label="Points pooled" value={String(window)} onChange={(event) => changeQuery({ smooth: event.currentTarget.value === String(usual) ? "" : event.currentTarget.value })}>
        {WINDOWS.map((one) => (
          <option key={one} value={String(one)}>
            {one === 1 ? "no" : `${one} points`}
          </option>
        ))}
      </select>
    </label>
  );
}
