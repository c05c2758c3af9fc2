/**
 * Terminal colours in text that an agent wrote: the sequences that set them become classes, every other escape stays
 * visible.
 *
 * Invariants: whatever comes in, each of its characters that can be seen comes out once and in order; a sequence can make
 * text coloured, bold or underlined, but never hide, move or overwrite it (so no backgrounds, no "conceal", no cursor);
 * the work is linear in the length of the text.
 */

/** A run of text in one look; `classes` is empty for ordinary text. */
export interface Styled {
  readonly text: string;
  readonly classes: string;
}

const ESCAPE = "\u001b";
/** Longest sequence that is understood; hostile ones have no end. */
const MAX_SEQUENCE = 64;
const HUES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"] as const;

interface Look {
  hue: string;
  bold: boolean;
  dim: boolean;
  italic: boolean;
  underline: boolean;
  strike: boolean;
}

/** The runs of `text`, adjacent ones of one look merged. */
export function styled(text: string): Styled[] {
  if (!text.includes(ESCAPE)) return text === "" ? [] : [{ text, classes: "" }];
  const runs: Styled[] = [];
  let look = plain();
  let from = 0;
  const flush = (to: number): void => {
    if (to > from) push(runs, text.slice(from, to), classesOf(look));
  };
  for (let at = text.indexOf(ESCAPE); at >= 0; at = text.indexOf(ESCAPE, at + 1)) {
    const codes = graphicsAt(text, at);
    if (codes === undefined) continue;
    flush(at);
    look = applied(look, codes.values);
    from = codes.end;
  }
  flush(text.length);
  return runs;
}

function push(runs: Styled[], text: string, classes: string): void {
  const last = runs.at(-1);
  if (last?.classes === classes) runs[runs.length - 1] = { text: last.text + text, classes };
  else runs.push({ text, classes });
}

/** The parameters of the sequence ESC [ ... m that starts at `at`, if one does. */
function graphicsAt(text: string, at: number): { values: number[]; end: number } | undefined {
  if (text[at + 1] !== "[") return undefined;
  const limit = Math.min(text.length, at + MAX_SEQUENCE);
  for (let i = at + 2; i < limit; i += 1) {
    const code = text.charCodeAt(i);
    if (code === 0x6d) {
      const inner = text.slice(at + 2, i);
      return { values: inner === "" ? [0] : inner.split(/[;:]/).map((part) => (part === "" ? 0 : Number(part))), end: i + 1 };
    }
    const isParameter = (code >= 0x30 && code <= 0x39) || code === 0x3b || code === 0x3a;
    if (!isParameter) return undefined;
  }
  return undefined;
}

function plain(): Look {
  return { hue: "", bold: false, dim: false, italic: false, underline: false, strike: false };
}

function applied(look: Look, codes: readonly number[]): Look {
  let next = { ...look };
  for (let i = 0; i < codes.length; i += 1) {
    const code = codes[i] ?? 0;
    if (code === 0) next = plain();
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 9) next.strike = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code === 29) next.strike = false;
    else if (code >= 30 && code <= 37) next.hue = HUES[code - 30] ?? "";
    else if (code >= 90 && code <= 97) next.hue = HUES[code - 90] ?? "";
    else if (code === 39) next.hue = "";
    else if (code === 38 || code === 48) {
      const extended = extendedHue(codes, i);
      if (code === 38) next.hue = extended.hue;
      i = extended.last;
    }
  }
  return next;
}

/** What 38;5;N and 38;2;R;G;B say, as the nearest of the eight hues: those are legible in every theme. */
function extendedHue(codes: readonly number[], at: number): { hue: string; last: number } {
  if (codes[at + 1] === 5) return { hue: hueOfIndex(codes[at + 2] ?? 0), last: at + 2 };
  if (codes[at + 1] === 2) {
    return { hue: hueOfColour(codes[at + 2] ?? 0, codes[at + 3] ?? 0, codes[at + 4] ?? 0), last: at + 4 };
  }
  return { hue: "", last: at + 1 };
}

function hueOfIndex(index: number): string {
  if (index < 16) return HUES[index % 8] ?? "";
  if (index > 231) return index < 244 ? "black" : "white";
  const cube = index - 16;
  return hueOfColour(Math.floor(cube / 36) * 51, (Math.floor(cube / 6) % 6) * 51, (cube % 6) * 51);
}

function hueOfColour(red: number, green: number, blue: number): string {
  const most = Math.max(red, green, blue);
  if (most - Math.min(red, green, blue) < 40) return most < 128 ? "black" : "white";
  const bits = (red * 2 > most ? 1 : 0) + (green * 2 > most ? 2 : 0) + (blue * 2 > most ? 4 : 0);
  return HUES[bits] ?? "";
}

function classesOf(look: Look): string {
  const names: string[] = [];
  if (look.hue !== "") names.push(`ansi-${look.hue}`);
  for (const name of ["bold", "dim", "italic", "underline", "strike"] as const) if (look[name]) names.push(`ansi-${name}`);
  return names.join(" ");
}
