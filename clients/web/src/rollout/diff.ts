/**
 * A unified diff as files, hunks and rows with line numbers.
 *
 * What it says was written by an agent: paths and lines are only ever text. Invariants (tested): every line of the diff is
 * in one row, line numbers follow from the hunks' headings, a diff that breaks off or is none at all still gives rows.
 */

export type RowKind = "context" | "added" | "removed" | "note";

/** A line; numbers are those in the old and the new file, from 1. */
export interface Row {
  readonly kind: RowKind;
  readonly text: string;
  readonly before: number | undefined;
  readonly after: number | undefined;
}

export interface Hunk {
  readonly heading: string;
  readonly rows: readonly Row[];
}

/** A file that changed. `what` says in words what happened to it. */
export interface FileDiff {
  readonly path: string;
  readonly what: "changed" | "added" | "removed";
  readonly added: number;
  readonly removed: number;
  /** Lines before the first hunk that name no file: modes, "Binary files differ". */
  readonly notes: readonly string[];
  readonly hunks: readonly Hunk[];
}

const HEADING = /^@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@/u;
const NOWHERE = "/dev/null";

interface Building {
  before: string;
  after: string;
  notes: string[];
  hunks: { heading: string; rows: Row[] }[];
}

/** The files of a diff, in order. */
export function parseDiff(text: string): FileDiff[] {
  const files: Building[] = [];
  let file: Building | undefined;
  let rows: Row[] | undefined;
  let before = 0;
  let after = 0;
  let beforeLeft = 0;
  let afterLeft = 0;
  const begin = (): Building => {
    file = { before: "", after: "", notes: [], hunks: [] };
    files.push(file);
    rows = undefined;
    return file;
  };
  const lines = text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  for (const line of lines) {
    if (rows && (beforeLeft > 0 || afterLeft > 0)) {
      const sign = line[0] ?? " ";
      if (sign === "+" && afterLeft > 0) {
        rows.push({ kind: "added", text: line.slice(1), before: undefined, after });
        after += 1;
        afterLeft -= 1;
        continue;
      }
      if (sign === "-" && beforeLeft > 0) {
        rows.push({ kind: "removed", text: line.slice(1), before, after: undefined });
        before += 1;
        beforeLeft -= 1;
        continue;
      }
      if (sign === " " && beforeLeft > 0 && afterLeft > 0) {
        rows.push({ kind: "context", text: line.slice(1), before, after });
        before += 1;
        after += 1;
        beforeLeft -= 1;
        afterLeft -= 1;
        continue;
      }
    }
    if (rows && line.startsWith("\\")) {
      rows.push(note(line));
      continue;
    }
    beforeLeft = afterLeft = 0;
    const heading = HEADING.exec(line);
    if (heading) {
      const owner = file ?? begin();
      rows = [];
      owner.hunks.push({ heading: line, rows });
      before = Number(heading[1]);
      after = Number(heading[3]);
      beforeLeft = heading[2] === undefined ? 1 : Number(heading[2]);
      afterLeft = heading[4] === undefined ? 1 : Number(heading[4]);
    } else if (line.startsWith("diff ")) {
      begin().notes.push(line);
    } else if (line.startsWith("--- ")) {
      const owner = file && file.before === "" && file.hunks.length === 0 ? file : begin();
      owner.before = pathOf(line.slice(4));
      rows = undefined;
    } else if (line.startsWith("+++ ") && file && file.hunks.length === 0) {
      file.after = pathOf(line.slice(4));
    } else if (rows) {
      rows.push(note(line));
    } else {
      (file ?? begin()).notes.push(line);
    }
  }
  return files.map(finished);
}

function note(text: string): Row {
  return { kind: "note", text, before: undefined, after: undefined };
}

/** A path of a heading: without a time behind a tab and without "a/" and "b/". */
function pathOf(text: string): string {
  const path = text.split("\t", 1)[0] ?? "";
  return path === NOWHERE ? path : path.replace(/^[ab]\//u, "");
}

function finished(file: Building): FileDiff {
  const rows = file.hunks.flatMap((hunk) => hunk.rows);
  const named = file.after !== "" && file.after !== NOWHERE ? file.after : file.before;
  return {
    path: named === "" || named === NOWHERE ? (/ b\/(.*)$/u.exec(file.notes[0] ?? "")?.[1] ?? "") : named,
    what: file.before === NOWHERE ? "added" : file.after === NOWHERE ? "removed" : "changed",
    added: rows.filter((row) => row.kind === "added").length,
    removed: rows.filter((row) => row.kind === "removed").length,
    notes: file.notes.filter((line) => !line.startsWith("diff ")),
    hunks: file.hunks,
  };
}
