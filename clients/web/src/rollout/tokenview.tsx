/**
 * Sampled tokens, coloured by how likely each was; the one under the pointer or the keyboard's focus is described.
 *
 * Of a long completion only the chunks close to what is seen have elements, so that tens of thousands of tokens scroll as
 * text does.
 */

import { signal } from "@preact/signals";
import { useCallback, useEffect, useMemo, useRef } from "preact/hooks";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { useInView } from "./near";
import { background, css, STEPS, stepLabel } from "./scale";
import {
  agreement,
  type Chunk,
  type Colouring,
  chunks,
  nextSurprise,
  quotedToken,
  rangeOf,
  type Run,
  type Span,
  tokenAt,
  versionAt,
} from "./tokens";
import { figure, untrainedWords } from "./words";
import "./tokens.css";

/** What the colours say; one choice for all pages. */
export const colouring = signal<Colouring>("logprob");
/** What they say where two rollouts stand side by side. */
const pairColouring = signal<Colouring>("change");

interface Current {
  readonly owner: symbol;
  readonly span: Span;
  readonly index: number;
  readonly title: string;
}
/** The token that is described. */
const current = signal<Current | undefined>(undefined);

/** Puts the scale's colours where the style sheet finds them: a style sheet cannot reckon them itself. */
export function paintScale(): void {
  const sheet = new CSSStyleSheet();
  const rules = (theme: "light" | "dark"): string =>
    Array.from({ length: STEPS - 1 }, (_, index) => `--p${index + 1}: ${css(background(index + 1, theme))};`).join(" ");
  sheet.replaceSync(
    `:root { ${rules("light")} } :root[data-theme="dark"] { ${rules("dark")} }` +
      `@media (prefers-color-scheme: dark) { :root[data-theme="system"] { ${rules("dark")} } }`,
  );
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
}
paintScale();

interface Props {
  readonly span: Span;
  readonly from: number;
  readonly to: number;
  /** Of which completion, for the description: "call 3". */
  readonly title: string;
  /** A token that is pointed out: where siblings part. */
  readonly marked?: number | undefined;
}

/** Tokens [from, to) of a span. */
export function TokenView({ span, from, to, title, marked }: Props) {
  const by = span.counterpart ? pairColouring.value : colouring.value;
  const made = useMemo(() => chunks(span, by, from, to), [span, by, from, to]);
  const root = useRef<HTMLDivElement>(null);
  const owner = useMemo(() => Symbol(title), [title]);
  const runsByStart = useMemo(() => new Map(made.flatMap((chunk) => chunk.runs.map((run) => [run.start, run] as const))), [made]);

  const textOf = (run: Run | undefined): Node | null | undefined => run && root.current?.querySelector(`[data-start="${run.start}"]`)?.firstChild;
  const paintToken = (index: number, name: typeof CURRENT | typeof MARKED): void => {
    const run = runAt(made, index);
    const text = textOf(run);
    if (run && text) highlight(text, rangeOf(span, run, index), name);
  };
  /** What is pointed out, again: elements come and go as one scrolls. */
  const paint = useCallback(() => {
    const shown = current.peek();
    if (shown?.owner === owner) paintToken(shown.index, CURRENT);
    if (marked !== undefined) paintToken(marked, MARKED);
  }, [made, marked, owner]);
  const show = (index: number): void => {
    current.value = { owner, span, index, title };
    paintToken(index, CURRENT);
  };
  useEffect(() => () => forget(owner), [owner]);

  const onPointer = (event: TargetedPointerEvent<HTMLDivElement>): void => {
    const element = event.target instanceof Element ? event.target.closest("[data-start]") : null;
    const run = element && runsByStart.get(Number(element.getAttribute("data-start")));
    const text = element?.firstChild;
    if (!run || !text) return;
    const offset = offsetAt(text, event.clientX, event.clientY);
    if (offset !== undefined) show(tokenAt(span, run, offset));
  };
  const onKeyDown = (event: TargetedKeyboardEvent<HTMLDivElement>): void => {
    const at = current.peek()?.owner === owner ? (current.peek()?.index ?? from) : from - 1;
    const next = moved(span, event.key, at, from, to);
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    show(next);
    const run = runAt(made, next);
    const chunk = made.find((item) => next >= item.start && next < item.end);
    const element = root.current?.querySelector(`[data-start="${run?.start}"]`) ?? root.current?.querySelector(`[data-chunk="${chunk?.start}"]`);
    element?.scrollIntoView({ block: "nearest" });
  };
  return (
    <div
      ref={root}
      class="tokens"
      dir="auto"
      tabIndex={0}
      role="group"
      aria-label={`${to - from} sampled tokens of ${title}. Arrows go from token to token, n and p to unlikely ones.`}
      onPointerMove={onPointer}
      onPointerDown={onPointer}
      onKeyDown={onKeyDown}
    >
      {made.map((chunk, index) => (
        <ChunkView key={chunk.start} chunk={chunk} isLast={index === made.length - 1} isWatched={to - from > LARGE_TOKENS} paint={paint} />
      ))}
    </div>
  );
}

/** From so many tokens on, chunks that are far from what is seen have no elements, only their height. */
const LARGE_TOKENS = 2_000;
const LINE_PX = 21;
const LINE_CHARACTERS = 90;

/** About how high a chunk will be. */
function heightOf(chunk: Chunk): number {
  const lines = chunk.runs.map((run) => run.text).join("").split("\n");
  return LINE_PX * lines.reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / LINE_CHARACTERS)), 0);
}

/** Line breaks at the very end would be empty lines that say nothing. */
const withoutEnd = (text: string): string => text.replace(/\n+$/u, "") || "⏎";

interface ChunkProps {
  readonly chunk: Chunk;
  readonly isLast: boolean;
  readonly isWatched: boolean;
  /** Paints what is pointed out in it, when its elements are there. */
  readonly paint: () => void;
}

function ChunkView({ chunk, isLast, isWatched, paint }: ChunkProps) {
  const root = useRef<HTMLDivElement>(null);
  const { isIn, height } = useInView(root, isWatched);
  useEffect(() => {
    if (isIn) paint();
  }, [isIn, paint]);
  return (
    <div ref={root} data-chunk={chunk.start} style={isIn ? { minHeight: "" } : { minHeight: `${height ?? heightOf(chunk)}px` }}>
      {isIn &&
        chunk.runs.map((run, index) => (
          <span key={run.start} data-start={run.start} class={run.classes}>
            {isLast && index === chunk.runs.length - 1 ? withoutEnd(run.text) : run.text}
          </span>
        ))}
    </div>
  );
}

function runAt(made: readonly Chunk[], index: number): Run | undefined {
  const chunk = made.find((item) => index >= item.start && index < item.end);
  return chunk?.runs.find((run) => index >= run.start && index < run.end);
}

function moved(span: Span, key: string, at: number, from: number, to: number): number | undefined {
  const within = (index: number): number => Math.min(to - 1, Math.max(from, index));
  switch (key) {
    case "ArrowRight":
      return within(at + 1);
    case "ArrowLeft":
      return within(at - 1);
    case "Home":
      return from;
    case "End":
      return to - 1;
    case "n":
    case "p": {
      const found = nextSurprise(span, at, key === "n" ? 1 : -1);
      // Without another one it stays where it is: the page has other uses for the key.
      return found >= from && found < to ? found : within(at);
    }
    default:
      return undefined;
  }
}

const CURRENT = "token-current";
const MARKED = "token-marked";

/** Paints a part of a text without touching the document; a browser that cannot paints nothing. */
function highlight(text: Node, [from, to]: readonly [number, number], name: typeof CURRENT | typeof MARKED): void {
  if (!("highlights" in CSS)) return;
  const range = new Range();
  const length = text.textContent?.length ?? 0;
  range.setStart(text, Math.min(from, length));
  range.setEnd(text, Math.min(to, length));
  const known = CSS.highlights.get(name);
  // There is one current token, but siblings have a mark each.
  if (name === MARKED && known) known.add(range);
  else CSS.highlights.set(name, new Highlight(range));
}

function forget(owner: symbol): void {
  if (current.peek()?.owner === owner) current.value = undefined;
  if ("highlights" in CSS) {
    CSS.highlights.delete(CURRENT);
    CSS.highlights.delete(MARKED);
  }
}

interface CaretDocument {
  caretPositionFromPoint?(x: number, y: number): { offsetNode: Node; offset: number } | null;
  caretRangeFromPoint?(x: number, y: number): Range | null;
}

/** The character of `text` that lies at a point; undefined = none does. */
function offsetAt(text: Node, x: number, y: number): number | undefined {
  const from = document as CaretDocument;
  const position = from.caretPositionFromPoint?.(x, y);
  const range = position ? undefined : from.caretRangeFromPoint?.(x, y);
  const node = position?.offsetNode ?? range?.startContainer;
  const offset = position?.offset ?? range?.startOffset;
  if (node !== text || offset === undefined) return undefined;
  // A caret stands between characters: the one before it is meant in the right half of a character.
  const before = new Range();
  before.setStart(text, Math.max(0, offset - 1));
  before.setEnd(text, offset);
  const box = before.getBoundingClientRect();
  const isBefore = offset > 0 && x >= box.left && x < box.right && y >= box.top && y <= box.bottom;
  return isBefore ? offset - 1 : Math.min(offset, (text.textContent?.length ?? 1) - 1);
}

/** The description of the current token, at the foot of the page. */
export function Inspector() {
  const shown = current.value;
  if (!shown) return null;
  const { span, index, title } = shown;
  const logprob = span.logprobs?.[index];
  const version = versionAt(span.versions, index);
  return (
    <output class="inspector" aria-live="polite">
      <code class="inspector-token">{quotedToken(span.texts[index] ?? "")}</code>
      <Fact name="id" value={String(span.ids[index])} />
      <Fact name="logprob" value={logprob === undefined ? "none" : figure(logprob)} />
      {logprob !== undefined && <Fact name="p" value={`${figure(Math.exp(logprob) * 100)} %`} />}
      <Change span={span} index={index} />
      <Fact name="policy version" value={version === undefined ? "unknown" : String(version)} />
      <Fact name="training" value={span.untrained === undefined ? "not known yet" : untrainedWords(span.untrained) || "trained"} />
      <Fact name={title} value={`token ${index} of ${span.ids.length}`} />
      <button type="button" class="button quiet" aria-label="Close" onClick={() => (current.value = undefined)}>
        ✕
      </button>
    </output>
  );
}

/** What the other rollout has at a token. */
function Change({ span, index }: { span: Span; index: number }) {
  const { counterpart } = span;
  if (!counterpart) return null;
  const other = counterpart.side === "left" ? "right" : "left";
  if ((counterpart.at[index] ?? -1) < 0) return <Fact name={`on the ${other}`} value="not sampled" />;
  const both = agreement(span, index);
  if (!both) return <Fact name={`on the ${other}`} value="the same, without logprob" />;
  return (
    <>
      <Fact name={`logprob on the ${other}`} value={figure(counterpart.side === "left" ? both.right : both.left)} />
      <Fact name="right − left" value={`${signed(both.right - both.left)} nats${both.isSameContext ? "" : ", after other tokens"}`} />
    </>
  );
}

/** A difference, with its sign. */
export const signed = (value: number): string => `${value > 0 ? "+" : ""}${figure(value)}`;

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <span class="inspector-fact">
      <span class="muted">{name}</span> <span class="num">{value}</span>
    </span>
  );
}

const ALONE: readonly (readonly [Colouring, string])[] = [
  ["logprob", "Probability"],
  ["version", "Policy version"],
  ["none", "None"],
];

const PAIR = [["change", "Change"], ...ALONE] as const;

/** What colours mean, and the choice of them: of one rollout, or of two side by side. */
export function Legend({ isPair = false }: { isPair?: boolean }) {
  const chosen = isPair ? pairColouring : colouring;
  return (
    <div class="legend">
      <fieldset class="segmented">
        <legend class="visually-hidden">Tokens are coloured by</legend>
        {(isPair ? PAIR : ALONE).map(([value, name]) => (
          <label key={value} class={chosen.value === value ? "chosen" : ""}>
            <input type="radio" name="colouring" checked={chosen.value === value} onChange={() => (chosen.value = value)} />
            {name}
          </label>
        ))}
      </fieldset>
      {chosen.value === "change" && (
        <span class="legend-scale">
          <span class="legend-step same" /> <span class="muted">in both</span>
          <span class="legend-step changed" /> <span class="muted">in one alone</span>
        </span>
      )}
      {chosen.value === "logprob" && (
        <span class="legend-scale" role="img" aria-label="From certain, without colour, to unlikely, dark and underlined">
          <span class="muted">certain</span>
          {Array.from({ length: STEPS }, (_, step) => (
            <span key={step} class={`legend-step p${step}`} title={stepLabel(step)} />
          ))}
          <span class="muted">unlikely</span>
        </span>
      )}
    </div>
  );
}
