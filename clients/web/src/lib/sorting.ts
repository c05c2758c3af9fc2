// The order of a table's rows, as the address has it: "reward" from the least, "-reward" from the most.

/** What a row is sorted by; null stands last in either direction. */
export type SortKey = string | number | null;

export interface Sorting {
  readonly by: string;
  readonly isDown: boolean;
}

/** Reads it; undefined where it names none of the columns. */
export function parseSorting(text: string | null, columns: readonly string[]): Sorting | undefined {
  const isDown = text?.startsWith("-") ?? false;
  const by = (text ?? "").slice(isDown ? 1 : 0);
  return columns.includes(by) ? { by, isDown } : undefined;
}

/** What the address has after a column's head is pressed: first its usual direction, then the other, then none. */
export function nextSorting(now: Sorting | undefined, by: string, isDownFirst: boolean): string {
  const first = isDownFirst ? `-${by}` : by;
  if (now?.by !== by) return first;
  return now.isDown === isDownFirst ? (isDownFirst ? by : `-${by}`) : "";
}

const WORDS = new Intl.Collator("en", { numeric: true });

/** The rows in order; those that are alike stay as they were. */
export function sorted<R>(rows: readonly R[], keyOf: (row: R) => SortKey, isDown: boolean): R[] {
  return rows
    .map((row) => ({ row, key: keyOf(row) }))
    .sort((a, b) => {
      if (a.key === null || b.key === null) return Number(a.key === null) - Number(b.key === null);
      const order = typeof a.key === "number" && typeof b.key === "number" ? a.key - b.key : WORDS.compare(String(a.key), String(b.key));
      return isDown ? -order : order;
    })
    .map(({ row }) => row);
}
