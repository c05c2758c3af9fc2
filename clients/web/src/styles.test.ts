import { expect, test } from "vitest";

/** Which elements a sheet is for: pages stay loaded after one has left them, and so do their sheets. */
const ROOTS: Readonly<Record<string, readonly string[]>> = {
  overview: ["overview"],
  rollout: ["rollout", "group"],
  compare: ["group"],
  services: ["services"],
  start: ["start"],
  run: ["runs"],
  tasks: ["tasks"],
};

const sheets = import.meta.glob<string>("./*/*.css", { query: "?raw", import: "default", eager: true });

/** The selectors that stand outermost, rules of @media included, names that are unique by themselves left out. */
function outermost(sheet: string): string[] {
  const found: string[] = [];
  let depth = 0;
  let prelude = "";
  for (const letter of sheet.replace(/\/\*[^]*?\*\//g, "")) {
    if (letter === "{") {
      const rule = prelude.trim();
      if (depth === 0 && !rule.startsWith("@keyframes") && !rule.startsWith("::highlight(")) found.push(rule);
      depth += 1;
    } else if (letter === "}") depth -= 1;
    prelude = letter === "{" || letter === "}" ? "" : prelude + letter;
  }
  return found;
}

test.each(Object.entries(sheets))("%s holds for its own page alone", (path, sheet) => {
  const roots = ROOTS[path.split("/")[1] ?? ""] ?? [];
  const wrapper = `:where(${roots.map((root) => `.${root}`).join(", ")})`;
  const selectors = outermost(sheet).flatMap((rule) => (rule.startsWith(":where(") ? [rule] : rule.split(",").map((one) => one.trim())));
  expect(selectors.length).toBeGreaterThan(0);
  for (const selector of selectors) expect(selector === wrapper || roots.some((root) => new RegExp(`^\\.${root}(?![\\w-])`).test(selector)), selector).toBe(true);
});
