/** Text that nobody may trust, on the page: text nodes only, bounded, with what cannot be seen made visible. */

import { useMemo, useState } from "preact/hooks";
import { byteCount, decoded, excerpt, FIRST_CHARACTERS, FIRST_LINES, MORE_CHARACTERS, MOST_CHARACTERS, pieces } from "./safe";
import "./hostile.css";

interface Props {
  /** Text, or bytes that should be text. */
  readonly text: string | Uint8Array;
  /** What it is, for users of a screen reader. */
  readonly label: string;
  /** Whether it is shown as running text instead of as it stands. */
  readonly prose?: boolean;
}

/** Whatever it says, as it says it. */
export function HostileText({ text, label, prose = false }: Props) {
  const whole = useMemo(() => (typeof text === "string" ? text : decoded(text)), [text]);
  const [most, setMost] = useState(FIRST_CHARACTERS);
  const part = useMemo(() => excerpt(whole, most, most > FIRST_CHARACTERS ? undefined : FIRST_LINES), [whole, most]);
  const runs = useMemo(() => pieces(part.text), [part]);
  if (whole === "") return <p class="hostile-empty muted">nothing</p>;
  const canShowMore = part.hidden > 0 && part.text.length < MOST_CHARACTERS;
  return (
    <div class="hostile">
      <pre class={prose ? "hostile-text prose" : "hostile-text"} dir="auto" aria-label={label}>
        {runs.map((run, index) =>
          run.classes === "" ? (
            run.text
          ) : (
            <span key={index} class={run.classes} title={run.title}>
              {run.text}
            </span>
          ),
        )}
      </pre>
      {part.hidden > 0 && (
        <div class="hostile-more">
          <span class="muted num">
            {byteCount(part.hidden)} of {byteCount(part.whole)} not shown
          </span>
          {canShowMore && (
            <button type="button" class="button" onClick={() => setMost(Math.min(most + MORE_CHARACTERS, MOST_CHARACTERS))}>
              Show more
            </button>
          )}
          <button type="button" class="button" onClick={() => save(text, label)}>
            Save all as a file
          </button>
        </div>
      )}
    </div>
  );
}

/** Hands the whole of it to the person as a plain text file. */
function save(text: string | Uint8Array, label: string): void {
  const url = URL.createObjectURL(new Blob([text as BlobPart], { type: "text/plain" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${label.replace(/[^a-zA-Z0-9]+/gu, "-")}.txt`;
  link.click();
  URL.revokeObjectURL(url);
}
