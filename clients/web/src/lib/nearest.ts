// Which of the names that there are was probably meant.

/** The name that is most like a wrong one; undefined = none is like it. */
export function nearest(wrong: string, names: readonly string[]): string | undefined {
  const most = Math.max(1, Math.floor(wrong.length / 3));
  const found = names.map((name) => ({ name, edits: edits(wrong, name) })).sort((a, b) => a.edits - b.edits)[0];
  return found && found.edits <= most ? found.name : undefined;
}

/** Letters that have to be put in, taken out or replaced (Levenshtein). */
function edits(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (const [i, letter] of [...a].entries()) {
    const next = [i + 1];
    for (let j = 0; j < b.length; j += 1)
      next.push(Math.min((row[j + 1] ?? 0) + 1, (next[j] ?? 0) + 1, (row[j] ?? 0) + (letter === b[j] ? 0 : 1)));
    row = next;
  }
  return row.at(-1) ?? 0;
}
