/** Two rollouts beside each other, turn by turn: where they part, and which sampled tokens both have. */

import { useComputed, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { href } from "../lib/router";
import { TroubleNotice } from "../ui/notice";
import { type Capture, NO_CAPTURE, vocabulary as readVocabulary } from "../rollout/records";
import type { Counterpart } from "../rollout/tokens";
import { Legend } from "../rollout/tokenview";
import { conversationTree, type Turn } from "../rollout/tree";
import { TurnView } from "../rollout/turn";
import type { Vocabulary } from "../rollout/vocabulary";
import "../rollout/rollout.css";
import { counterpartOf, sameContexts, type SideName } from "./alignment";
import "./compare.css";
import { type Divergence, divergence, divergenceWords } from "./divergence";
import { readCapture, type Reading } from "./model";

/** One of the two, as far as it is known before its calls are read. */
export interface Compared {
  readonly id: string;
  readonly name: string;
  readonly isEnded: boolean;
  /** How many calls it has so far: they are read again when there are more. */
  readonly calls: number;
  /** Its end, its reward: what stands beside its name. */
  readonly facts: ComponentChildren;
}

const NOT_READ: Reading = { capture: NO_CAPTURE, trouble: undefined, isReading: true };

function useReading({ id, isEnded, calls }: Compared): Reading {
  const reading = useSignal<Reading>(NOT_READ);
  useEffect(() => {
    const abort = new AbortController();
    void readCapture(id, isEnded, abort.signal).then((found) => {
      if (found) reading.value = found;
    });
    return () => abort.abort();
  }, [id, isEnded, calls]);
  return reading.value;
}

/** Wants another key for another pair. */
export function SideBySide({ left, right, label }: { left: Compared; right: Compared; label: string }) {
  const a = useReading(left);
  const b = useReading(right);
  const isForeign = haveDifferentTokenizers(a.capture, b.capture);
  const words = useVocabulary(isForeign ? NO_CAPTURE : a.capture, isForeign ? NO_CAPTURE : b.capture);
  const vocabulary = useComputed(() => words.value);
  const mainA = useMemo(() => mainTurns(a.capture), [a.capture]);
  const mainB = useMemo(() => mainTurns(b.capture), [b.capture]);
  const isReading = a.isReading || b.isReading;
  const parting = useMemo(() => (isReading || isForeign ? undefined : divergence(callsOf(mainA), callsOf(mainB))), [mainA, mainB, isReading, isForeign]);
  const counterparts = useMemo(() => (isReading || isForeign ? [] : counterpartsOf(mainA, mainB, parting)), [mainA, mainB, parting, isReading, isForeign]);
  const root = useRef<HTMLElement>(null);
  const count = Math.max(mainA.length, mainB.length);
  return (
    <section class="comparison card" ref={root} aria-label={label}>
      <div class="comparison-head">
        <Side compared={left} reading={a} />
        <Side compared={right} reading={b} />
      </div>
      <div class="comparison-tools">
        {isForeign ? (
          <p>Their tokens are of two tokenizers and cannot be compared: messages are shown in their place.</p>
        ) : (
          <Parting parting={parting} isReading={isReading} hasCalls={mainA.length > 0 && mainB.length > 0} onGo={() => toTurn(root.current, parting)} />
        )}
        {!isForeign && <Legend isPair />}
      </div>
      {Array.from({ length: count }, (_, turn) => (
        <div key={turn} class={parting?.turn === turn ? "pair pair-parting" : "pair"} data-turn={turn}>
          {([["left", left, mainA[turn]], ["right", right, mainB[turn]]] as const).map(([side, { name }, shown]) => (
            <Half key={side} name={name} turn={shown} vocabulary={vocabulary} parting={parting} number={turn} counterpart={counterparts[turn]?.[side]} isEqual={parting !== undefined && turn < parting.turn} />
          ))}
        </div>
      ))}
    </section>
  );
}

const callsOf = (turns: readonly Turn[]) => turns.map((turn) => turn.call);

/** Of each turn what the other side has in its place, worked out when somebody looks at it. */
function counterpartsOf(left: readonly Turn[], right: readonly Turn[], parting: Divergence | undefined): Record<SideName, () => Counterpart>[] {
  const none: Counterpart = { side: "left", at: new Int32Array(), logprobs: undefined, sameUntil: 0 };
  return sameContexts(callsOf(left), callsOf(right), parting).map((sameUntil, turn) => {
    const [a, b] = [left[turn]?.call, right[turn]?.call];
    return {
      left: () => (a ? counterpartOf(a, b, "left", sameUntil) : none),
      right: () => (b ? counterpartOf(b, a, "right", sameUntil) : none),
    };
  });
}

/** Token ids of two tokenizers say nothing of each other. Unknown ones count as the same. */
function haveDifferentTokenizers(left: Capture, right: Capture): boolean {
  const [a, b] = [left.tokenizerSha256, right.tokenizerSha256];
  return a.length > 0 && b.length > 0 && a.join() !== b.join();
}

function Side({ compared, reading }: { compared: Compared; reading: Reading }) {
  return (
    <div class="side">
      <a href={href("/rollouts", compared.id)}>{compared.name}</a> {compared.facts}
      {reading.trouble && <TroubleNotice trouble={reading.trouble} />}
      {!reading.isReading && !reading.trouble && reading.capture.calls.length === 0 && <p class="muted">{compared.isEnded ? "It has no captured calls." : "It has not asked the model yet."}</p>}
    </div>
  );
}

function Parting({ parting, isReading, hasCalls, onGo }: { parting: Divergence | undefined; isReading: boolean; hasCalls: boolean; onGo: () => void }) {
  if (isReading) return <p class="muted">Reading both…</p>;
  if (!hasCalls) return <p class="muted">There is nothing to compare token by token.</p>;
  if (!parting) return <p>Token by token they are equal, as far as tokens were captured.</p>;
  return (
    <p>
      {divergenceWords(parting)}{" "}
      <button type="button" class="button" onClick={onGo}>
        Go there
      </button>
    </p>
  );
}

interface HalfProps {
  readonly name: string;
  readonly turn: Turn | undefined;
  readonly vocabulary: Parameters<typeof TurnView>[0]["vocabulary"];
  readonly parting: Divergence | undefined;
  readonly number: number;
  readonly counterpart: (() => Counterpart) | undefined;
  readonly isEqual: boolean;
}

function Half({ name, turn, vocabulary, parting, number, counterpart, isEqual }: HalfProps) {
  if (!turn)
    return (
      <div class="half half-none muted">
        <p>
          <span class="half-name">{name}: </span>no such call
        </p>
      </div>
    );
  const marked = parting?.turn === number && parting.where === "completion" ? parting.token : undefined;
  return (
    <div class="half">
      <p class="half-name">{name}</p>
      {isEqual && <p class="chip">the same in both</p>}
      <TurnView turn={turn} vocabulary={vocabulary} marked={marked} counterpart={counterpart} />
    </div>
  );
}

/** The turns of the main conversation. */
function mainTurns(capture: Capture): readonly Turn[] {
  return conversationTree(capture.calls, capture.branches, capture.samples)[0]?.turns ?? [];
}

function useVocabulary(...captures: readonly Capture[]) {
  const words = useSignal<Vocabulary | undefined>(undefined);
  const digest = captures.find((capture) => capture.tokenizerSha256.length > 0)?.tokenizerSha256;
  useEffect(() => {
    words.value = undefined;
    if (!digest) return;
    let isWanted = true;
    readVocabulary(digest).then(
      (found) => {
        if (isWanted) words.value = found;
      },
      () => {}, // messages are shown in place of tokens
    );
    return () => {
      isWanted = false;
    };
  }, [digest?.join(",")]);
  return words;
}

function toTurn(root: HTMLElement | null, parting: Divergence | undefined): void {
  root?.querySelector(`[data-turn="${parting?.turn}"]`)?.scrollIntoView({ block: "start" });
}
