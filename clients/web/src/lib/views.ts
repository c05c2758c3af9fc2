// Saved views: places of the page with their filter, order and axes, under a name, kept by this browser.
//
// Invariants: what the browser keeps is read as what anybody may have written; names and number are bounded; a place is one of
// this page's own.
import { signal } from "@preact/signals";

export interface View {
  readonly name: string;
  /** As `location_` has it: "/?q=state:failed". */
  readonly place: string;
}

const KEY = "penstock.views";
export const MOST_VIEWS = 50;
export const MOST_NAME = 60;
const MOST_PLACE = 2000;

/** In the order in which they were saved. */
export const views = signal<readonly View[]>([]);

/** Reads what is kept; what is no view is left out. */
export function parseViews(text: string | null): View[] {
  let kept: unknown;
  try {
    kept = JSON.parse(text ?? "[]");
  } catch {
    return [];
  }
  if (!Array.isArray(kept)) return [];
  return kept.filter(isView).slice(0, MOST_VIEWS).map(({ name, place }) => ({ name, place }));
}

function isView(value: unknown): value is View {
  if (typeof value !== "object" || value === null) return false;
  const { name, place } = value as Partial<Record<"name" | "place", unknown>>;
  return typeof name === "string" && name !== "" && name.length <= MOST_NAME && typeof place === "string" && isPlace(place);
}

const isPlace = (place: string): boolean => place.startsWith("/") && !place.startsWith("//") && place.length <= MOST_PLACE;

/** Why a view cannot be saved, in words; empty = it can. */
export function refusal(name: string, place: string, known: readonly View[]): string {
  if (!name.trim()) return "Name: expected 1 to 60 characters.";
  if (name.trim().length > MOST_NAME) return `Name: ${name.trim().length} characters, at most ${MOST_NAME}.`;
  if (!isPlace(place)) return `The address is too long to be saved: ${place.length} characters, at most ${MOST_PLACE}.`;
  if (known.length >= MOST_VIEWS && !known.some((one) => one.name === name.trim())) return `There are ${MOST_VIEWS} views, which is the most: delete one first.`;
  return "";
}

/** Reads the views, and again when another tab changes them. To be called once. */
export function startViews(): void {
  const read = () => {
    views.value = parseViews(localStorage.getItem(KEY));
  };
  read();
  window.addEventListener("storage", (event) => {
    if (event.key === KEY) read();
  });
}

/** Saves a view; one of the same name is replaced. Gives why it could not, in words; empty = it is saved. */
export function saveView(name: string, place: string): string {
  const why = refusal(name, place, views.peek());
  if (why) return why;
  const view = { name: name.trim(), place };
  const others = views.peek().filter((one) => one.name !== view.name);
  return keep([...others, view]);
}

/** Deletes a view. */
export function deleteView(name: string): string {
  return keep(views.peek().filter((one) => one.name !== name));
}

function keep(next: readonly View[]): string {
  try {
    localStorage.setItem(KEY, JSON.stringify(next));
  } catch {
    return "This browser keeps nothing for the page: its storage is full or switched off.";
  }
  views.value = next;
  return "";
}
