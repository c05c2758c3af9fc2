// A table that is sorted by its columns' heads and shows a page of its rows; order and page are in the address.
import type { ComponentChildren } from "preact";

import { changeQuery } from "../lib/router";
import { nextSorting, parseSorting, sorted, type Sorting, type SortKey } from "../lib/sorting";

export const PAGE_ROWS = 50;

export interface Column<R> {
  /** In the address. */
  readonly key: string;
  readonly name: string;
  /** What the head says when it is hovered. */
  readonly title?: string;
  readonly sortBy: (row: R) => SortKey;
  readonly cell: (row: R) => ComponentChildren;
  readonly isNumber?: boolean;
  /** Left out on a narrow screen. */
  readonly isWide?: boolean;
}

interface Props<R> {
  readonly label: string;
  readonly columns: readonly Column<R>[];
  readonly rows: readonly R[];
  readonly keyOf: (row: R) => string;
  readonly query: URLSearchParams;
  /** What stands there without rows. */
  readonly empty: string;
  /** Keys of the address, for the second table of a page. */
  readonly prefix?: string;
}

export function DataTable<R>({ label, columns, rows, keyOf, query, empty, prefix = "" }: Props<R>) {
  const [sortKey, pageKey] = [`${prefix}sort`, `${prefix}page`];
  const sorting = parseSorting(
    query.get(sortKey),
    columns.map(({ key }) => key),
  );
  const by = columns.find(({ key }) => key === sorting?.by);
  const ordered = by && sorting ? sorted(rows, by.sortBy, sorting.isDown) : rows;
  const { first, page, pages } = paged(rows.length, query.get(pageKey));
  return (
    <div class="card datatable">
      <div class="scroll">
        <table aria-label={label}>
          <thead>
            <tr>
              {columns.map((column) => (
                <th key={column.key} scope="col" aria-sort={ariaSort(sorting, column.key)} class={classOf(column)}>
                  <SortButton
                    name={column.name}
                    {...(column.title === undefined ? {} : { title: column.title })}
                    sorting={sorting}
                    by={column.key}
                    onSort={() => changeQuery({ [sortKey]: nextSorting(sorting, column.key, column.isNumber ?? false), [pageKey]: "" })}
                  />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {ordered.slice(first, first + PAGE_ROWS).map((row) => (
              <tr key={keyOf(row)}>
                {columns.map((column) => (
                  <td key={column.key} class={classOf(column)}>
                    {column.cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {!rows.length && <p class="empty">{empty}</p>}
      {pages > 1 && (
        <nav class="pager num" aria-label={`Pages of ${label}`}>
          <button type="button" class="button" disabled={page === 1} onClick={() => changeQuery({ [pageKey]: page > 2 ? String(page - 1) : "" })}>
            Before
          </button>
          <span>
            {first + 1} to {Math.min(first + PAGE_ROWS, rows.length)} of {rows.length}
          </span>
          <button type="button" class="button" disabled={page === pages} onClick={() => changeQuery({ [pageKey]: String(page + 1) })}>
            Next
          </button>
        </nav>
      )}
    </div>
  );
}

/** The page that the address asks for, 1 the first; one that is not there is the nearest. */
export function paged(count: number, asked: string | null): { readonly first: number; readonly page: number; readonly pages: number } {
  const pages = Math.max(1, Math.ceil(count / PAGE_ROWS));
  const page = Math.min(pages, Math.max(1, /^\d{1,6}$/.test(asked ?? "") ? Number(asked) : 1));
  return { first: (page - 1) * PAGE_ROWS, page, pages };
}

const classOf = <R,>({ isNumber, isWide }: Column<R>): string => [isNumber ? "right num" : "", isWide ? "wide" : ""].filter(Boolean).join(" ");

/** What a column's head says of the order. */
export function ariaSort(sorting: Sorting | undefined, by: string): "ascending" | "descending" | "none" {
  if (sorting?.by !== by) return "none";
  return sorting.isDown ? "descending" : "ascending";
}

interface SortButtonProps {
  readonly name: string;
  readonly title?: string;
  readonly by: string;
  readonly sorting: Sorting | undefined;
  readonly onSort: () => void;
}

/** A column's head that sorts. */
export function SortButton({ name, title, by, sorting, onSort }: SortButtonProps) {
  const isOn = sorting?.by === by;
  return (
    <button type="button" class="sorter" title={title} onClick={onSort}>
      {name}
      <span aria-hidden="true">{isOn ? (sorting.isDown ? " ▾" : " ▴") : ""}</span>
    </button>
  );
}
