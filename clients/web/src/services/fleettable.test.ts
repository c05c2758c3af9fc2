import type { ComponentChildren, VNode } from "preact";
import { describe, expect, test } from "vitest";

import type { Kind } from "../lib/transport";
import type { FleetRow, State } from "./fleet";
import { FleetTable } from "./fleettable";

const isNode = (children: ComponentChildren): children is VNode => typeof children === "object" && children !== null && "props" in children;

/** What is drawn, row by row; components without hooks are called. */
function drawn(children: ComponentChildren, rows: string[][] = [[]]): string[][] {
  if (Array.isArray(children)) for (const child of children) drawn(child as ComponentChildren, rows);
  else if (isNode(children)) {
    const { type, props } = children;
    if (typeof type === "function") return drawn((type as (given: unknown) => ComponentChildren)(props), rows);
    if (type === "tr") rows.push([]);
    drawn(props.children, rows);
  } else if (typeof children === "string" || typeof children === "number") rows.at(-1)?.push(String(children));
  return rows;
}

const row = (kind: Kind, name: string, state: State): FleetRow => ({ kind, name, address: `${name}:1`, state, status: null, problems: [] });

describe("the table of all services", () => {
  test("has a line with its state for each of several members of a kind", () => {
    const states: readonly State[] = ["up", "draining", "lost"];
    const kinds: readonly Kind[] = ["driver", "interception", "sandbox", "inference"];
    const fleet = kinds.flatMap((kind) => states.map((state, number) => row(kind, `${kind}-${number}`, state)));
    const [above, , ...lines] = drawn(FleetTable({ fleet }));
    expect(above).toContain("4 up, 4 draining, 4 lost");
    expect(lines.map((cells) => cells.slice(1, 4))).toEqual(fleet.map(({ name, address, state }) => [name, address, state]));
  });

  test("is not drawn before the first answer", () => expect(FleetTable({ fleet: [] })).toBeNull());
});
