/**
 * Text that nobody may trust, made fit to be looked at: what agents, models, tools and tasks wrote.
 *
 * It is always shown as text nodes; this module sees to what a text node alone does not: characters that cannot be seen
 * or that turn the order of others around are shown as marks, terminal colours as colours, and of a text of any length
 * only a bounded part is handed out. Invariant: `pieces` loses no visible character, and what it costs depends on what is
 * shown, not on what there is.
 */

import { styled } from "./ansi";

/** A run of text; a mark stands for a character that cannot be seen, and `title` says which. */
export interface Piece {
  readonly text: string;
  readonly classes: string;
  readonly title?: string;
}

/** A bounded part of a text. `hidden` counts the characters that were left out, `whole` those that there are. */
export interface Excerpt {
  readonly text: string;
  readonly hidden: number;
  readonly whole: number;
}

/** Characters that are shown before somebody asks for more, and how many more come each time. */
export const FIRST_CHARACTERS = 6_000;
export const MORE_CHARACTERS = 60_000;
/** Characters that a page shows of one text at most; the whole of it can be saved as a file. */
export const MOST_CHARACTERS = 600_000;
/** Lines that are shown before somebody asks for more. */
export const FIRST_LINES = 120;

const NAMES: ReadonlyMap<number, string> = new Map([
  [0x00ad, "soft hyphen"],
  [0x034f, "combining grapheme joiner"],
  [0x061c, "Arabic letter mark"],
  [0x115f, "Hangul filler"],
  [0x1160, "Hangul filler"],
  [0x17b4, "Khmer inherent vowel"],
  [0x17b5, "Khmer inherent vowel"],
  [0x180e, "Mongolian vowel separator"],
  [0x200b, "zero-width space"],
  [0x200c, "zero-width non-joiner"],
  [0x200d, "zero-width joiner"],
  [0x200e, "left-to-right mark"],
  [0x200f, "right-to-left mark"],
  [0x2028, "line separator"],
  [0x2029, "paragraph separator"],
  [0x202a, "left-to-right embedding"],
  [0x202b, "right-to-left embedding"],
  [0x202c, "pop directional formatting"],
  [0x202d, "left-to-right override"],
  [0x202e, "right-to-left override"],
  [0x2060, "word joiner"],
  [0x2066, "left-to-right isolate"],
  [0x2067, "right-to-left isolate"],
  [0x2068, "first strong isolate"],
  [0x2069, "pop directional isolate"],
  [0x2800, "blank Braille pattern"],
  [0x3164, "Hangul filler"],
  [0xfeff, "byte order mark"],
  [0xffa0, "Hangul filler"],
]);

/** A letter, or a mark on one, of a script that needs joiners to be written. */
const JOINED =
  /(?=[\p{L}\p{M}])[\p{scx=Arab}\p{scx=Syrc}\p{scx=Mong}\p{scx=Nkoo}\p{scx=Mand}\p{scx=Deva}\p{scx=Beng}\p{scx=Guru}\p{scx=Gujr}\p{scx=Orya}\p{scx=Taml}\p{scx=Telu}\p{scx=Knda}\p{scx=Mlym}\p{scx=Sinh}\p{scx=Mymr}\p{scx=Khmr}]/u;

/** What cannot be seen but is needed where it stands: emoji in colour, keycaps, emoji made of several, joined letters. */
const NEEDED = [
  /(?<=\p{Extended_Pictographic})\ufe0f/u,
  /(?<=[0-9#*])\ufe0f(?=\u20e3)/u,
  /(?<=\p{Extended_Pictographic}[\ufe0f\p{Emoji_Modifier}]?)\u200d(?=\p{Extended_Pictographic})/u,
  new RegExp(`(?<=${JOINED.source})[\\u200c\\u200d](?=${JOINED.source})`, "u"),
];

/*
 * Everything that cannot be seen or changes what can: control characters but tab and line feed, line separators, and all
 * that Unicode says is to be ignored where it is not known (bidirectional marks, joiners, fillers, tag characters and
 * variation selectors: each of them has carried whole hidden sentences), the Braille pattern without dots, and halves of
 * surrogate pairs.
 */
const UNSEEN = new RegExp(
  `(?!${NEEDED.map((needed) => needed.source).join("|")})` +
    // eslint-disable-next-line no-control-regex
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\u2800\ufff9-\ufffb\ud800-\udfff\p{Default_Ignorable_Code_Point}]/u.source,
  "gu",
);

/** The pieces of `text`, in order; adjacent unseen characters of one kind share a mark. */
export function pieces(text: string): Piece[] {
  const found: Piece[] = [];
  for (const run of styled(text.replaceAll("\r\n", "\n"))) {
    let from = 0;
    for (const match of run.text.matchAll(UNSEEN)) {
      const at = match.index;
      if (at > from) found.push({ text: run.text.slice(from, at), classes: run.classes });
      mark(found, match[0].codePointAt(0) ?? 0);
      from = at + match[0].length;
    }
    if (from < run.text.length) found.push({ text: run.text.slice(from), classes: run.classes });
  }
  return found;
}

const REPEATED = /^(.*) × (\d+)$/u;

function mark(found: Piece[], code: number): void {
  const text = shown(code);
  const title = titleOf(code);
  const last = found.at(-1);
  if (last?.title === title && last.classes === "mark") {
    const repeated = REPEATED.exec(last.text);
    const count = repeated ? Number(repeated[2]) + 1 : 2;
    found[found.length - 1] = { text: `${text} × ${count}`, classes: "mark", title };
    return;
  }
  found.push({ text, classes: "mark", title });
}

const CONTROLS =
  "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

/** How an unseen character is shown: control characters by their names, others by their code point. */
function shown(code: number): string {
  return CONTROLS[code] ?? (code === 0x7f ? "DEL" : codePoint(code));
}

/**
 * A text in which whatever cannot be seen stands as its name, for where there are no marks: tokens, labels. Whether it is
 * needed where it stands may depend on the texts around it.
 */
export function visible(text: string, before = "", after = ""): string {
  const end = before.length + text.length;
  const whole = (before + text + after).replace(UNSEEN, (unseen, at: number) => (at < before.length || at >= end ? unseen : `‹${shown(unseen.codePointAt(0) ?? 0)}›`));
  return whole.slice(before.length, whole.length - after.length);
}

function titleOf(code: number): string {
  const name = NAMES.get(code);
  if (name !== undefined) return `${codePoint(code)} ${name}`;
  if (code >= 0xd800 && code <= 0xdfff) return `${codePoint(code)} half of a character`;
  if (code >= 0xe0000 && code <= 0xe007f) return "hidden tag character";
  if (/\p{Variation_Selector}/u.test(String.fromCodePoint(code))) return `${codePoint(code)} variation selector`;
  return `${codePoint(code)} ${/\p{Cc}/u.test(String.fromCodePoint(code)) ? "control" : "invisible"} character`;
}

function codePoint(code: number): string {
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The first `most` characters and `lines` lines of `text`, never half a character. */
export function excerpt(text: string, most: number, lines: number = Number.POSITIVE_INFINITY): Excerpt {
  let end = Math.min(text.length, most);
  if (Number.isFinite(lines)) {
    let at = -1;
    for (let line = 0; line < lines; line += 1) {
      at = text.indexOf("\n", at + 1);
      if (at < 0 || at >= end) break;
    }
    if (at >= 0 && at < end) end = at;
  }
  if (end < text.length && isHigh(text.charCodeAt(end - 1))) end -= 1;
  return { text: text.slice(0, end), hidden: text.length - end, whole: text.length };
}

function isHigh(code: number): boolean {
  return code >= 0xd800 && code <= 0xdbff;
}

/** One line of at most `most` characters for a heading or a label: line breaks are spaces, colours are left out. */
export function oneLine(text: string, most = 120): string {
  const colourless = styled(text.slice(0, most * 4)).map((run) => run.text);
  const head = visible(colourless.join("").replace(/[ \t\r\n]+/gu, " ").trim());
  const cut = excerpt(head, most).text;
  return cut.length < head.length || text.length > most * 4 ? `${cut}…` : cut;
}

const DECODER = new TextDecoder("utf-8", { fatal: false, ignoreBOM: true });

/** Bytes as text; what is no UTF-8 is U+FFFD. */
export function decoded(bytes: Uint8Array): string {
  return DECODER.decode(bytes);
}

/** 1234567 as "1.2 MB". */
export function byteCount(count: number): string {
  if (count < 1000) return `${count} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = count;
  let unit = "B";
  for (const next of units) {
    if (value < 1000) break;
    value /= 1000;
    unit = next;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}
