// Where a curve leads: to the rollouts that a point is made of.
import { href } from "../lib/router";
import { type Axis, filterOf, type LinePoint } from "./model";

export const AXIS_NAMES: Readonly<Record<Axis, string>> = { step: "step", version: "policy version", group: "group" };

/**
 * Where the rollouts of a point are shown: of its step or group alone where a filter can name them, else of its run.
 *
 * @param ref of the run; empty = they have none.
 * @param shown the filter that the point's rows were chosen by; they are shown by it too.
 */
export function rowsPlace(ref: string, axis: Axis, { rows }: LinePoint, shown = ""): string {
  const group = rows[0]?.group ?? "";
  if (axis === "group" && group && rows.every((row) => row.group === group)) return href("/groups", group).slice(1);
  const step = rows[0]?.labels["step"];
  const more = axis === "step" && rows.every((row) => row.labels["step"] === step) ? [`label:step=${step}`] : [];
  const words = (text: string): string[] => text.split(" ").filter((word) => word);
  const filter = [...new Set([...words(shown), ...words(ref ? filterOf(ref, ...more) : more.join(" "))])].join(" ");
  return filter ? `/?${new URLSearchParams({ q: filter }).toString()}` : "/";
}
