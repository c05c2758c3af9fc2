// Routes in the fragment: #/rollouts/ID. The page is one file, so any static server and any prefix will do.
import { signal } from "@preact/signals";
import type { ComponentType } from "preact";

export type Params = Readonly<Record<string, string>>;

export interface Page {
  readonly default: ComponentType<{ params: Params; query: URLSearchParams }>;
}

export interface Route {
  /** For example "/rollouts/:id". */
  readonly pattern: string;
  /** For the tab's title. */
  readonly title: (params: Params) => string;
  readonly load: () => Promise<Page>;
}

export interface Match {
  readonly route: Route;
  readonly params: Params;
  readonly query: URLSearchParams;
}

/** Where the page is: "/rollouts/ID?x=y". */
export const location_ = signal(read());

function read(): string {
  return typeof location === "undefined" ? "/" : location.hash.replace(/^#/, "") || "/";
}

/** Follows the address bar. To be called once. */
export function startRouter(): void {
  location_.value = read();
  window.addEventListener("hashchange", () => {
    location_.value = read();
  });
}

/** Address of a place, for links: `<a href={href("/rollouts", id)}>`. */
export function href(...parts: readonly string[]): string {
  const [first = "/", ...rest] = parts;
  return `#${[first, ...rest.map(encodeURIComponent)].join("/")}`;
}

/** Goes to a place. */
export function go(...parts: readonly string[]): void {
  location.hash = href(...parts);
}

/** The query of a place. */
export function queryOf(place: string): URLSearchParams {
  return new URLSearchParams(place.split("?")[1] ?? "");
}

/** A query with other values for some of its keys; an empty one takes the key out. */
export function changed(query: URLSearchParams, changes: Readonly<Record<string, string>>): URLSearchParams {
  const next = new URLSearchParams(query);
  for (const [key, value] of Object.entries(changes)) {
    if (value) next.set(key, value);
    else next.delete(key);
  }
  return next;
}

/** Changes some values of the place's query, without an entry in the history. */
export function changeQuery(changes: Readonly<Record<string, string>>): void {
  setQuery(changed(queryOf(location_.peek()), changes));
}

/** Replaces the query of the place, without an entry in the history. */
export function setQuery(query: URLSearchParams): void {
  const [path = "/"] = location_.peek().split("?");
  const text = query.toString();
  history.replaceState(null, "", `#${path}${text ? `?${text}` : ""}`);
  location_.value = read();
}

/** The first route that a place matches; null where there is none. */
export function match(routes: readonly Route[], place: string): Match | null {
  const [path = "/", query = ""] = place.split("?");
  const given = path.split("/").filter(Boolean);
  for (const route of routes) {
    const wanted = route.pattern.split("/").filter(Boolean);
    if (wanted.length !== given.length) continue;
    const params: Record<string, string> = {};
    const fits = wanted.every((part, index) => {
      const value = given[index] ?? "";
      if (!part.startsWith(":")) return part === value;
      try {
        params[part.slice(1)] = decodeURIComponent(value);
      } catch {
        return false;
      }
      return true;
    });
    if (fits) return { route, params, query: new URLSearchParams(query) };
  }
  return null;
}
