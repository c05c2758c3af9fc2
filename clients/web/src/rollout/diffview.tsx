/** A unified diff: files that fold, lines with their numbers. */

import { useMemo, useState } from "preact/hooks";
import { HostileText } from "./hostile";
import { type FileDiff, parseDiff, type Row } from "./diff";
import { oneLine, pieces } from "./safe";
import { counted } from "./words";

const FIRST_ROWS = 400;
const MAX_LINE = 2_000;

export function DiffView({ text }: { text: string }) {
  const files = useMemo(() => parseDiff(text), [text]);
  if (files.length === 0) return <p class="muted">No file changed.</p>;
  return (
    <div class="diff">
      {files.map((file, index) => (
        <FileView key={index} file={file} isOpen={files.length <= 8} />
      ))}
    </div>
  );
}

function FileView({ file, isOpen }: { file: FileDiff; isOpen: boolean }) {
  const [most, setMost] = useState(FIRST_ROWS);
  const rows = useMemo(() => file.hunks.flatMap((hunk): Row[] => [{ kind: "note", text: hunk.heading, before: undefined, after: undefined }, ...hunk.rows]), [file]);
  return (
    <details class="diff-file" open={isOpen}>
      <summary>
        <code>{oneLine(file.path, 200)}</code>
        {file.what !== "changed" && <span class="chip">{file.what}</span>}
        <span class="num diff-added">+{file.added}</span>
        <span class="num diff-removed">−{file.removed}</span>
      </summary>
      {file.notes.length > 0 && <HostileText text={file.notes.join("\n")} label="notes" />}
      <div class="diff-rows" role="table" aria-label={`Changes of ${oneLine(file.path)}`}>
        {rows.slice(0, most).map((row, index) => (
          <RowView key={index} row={row} />
        ))}
      </div>
      {rows.length > most && (
        <button type="button" class="button" onClick={() => setMost(most * 4)}>
          Show more ({counted(rows.length - most, "line")})
        </button>
      )}
    </details>
  );
}

const SIGNS = { context: " ", added: "+", removed: "−", note: "" } as const;

function RowView({ row }: { row: Row }) {
  const text = row.text.length > MAX_LINE ? `${row.text.slice(0, MAX_LINE)} … ${counted(row.text.length - MAX_LINE, "more character")}` : row.text;
  return (
    <div class={`diff-row diff-${row.kind}`} role="row">
      <span class="diff-number" role="cell">
        {row.before}
      </span>
      <span class="diff-number" role="cell">
        {row.after}
      </span>
      <span class="diff-sign" role="cell" aria-label={row.kind}>
        {SIGNS[row.kind]}
      </span>
      <span class="diff-text" role="cell">
        {pieces(text).map((piece, index) => (
          <span key={index} class={piece.classes} title={piece.title}>
            {piece.text}
          </span>
        ))}
      </span>
    </div>
  );
}
