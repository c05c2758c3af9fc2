/** One model call: what the agent newly said, and what the model answered, token by token. */

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { type ReadonlySignal, useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Call, CallClass, CallState } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { explain, isCancelled } from "../lib/errors";
import { askToBranch } from "../ui/branch";
import { beginning, FIRST_PARTS, type Said, type SaidPart } from "./bodies";
import { partsOf, segmentsOf, spanOf, versionsOf, versionWords } from "./completion";
import { Fold } from "./fold";
import { HostileText } from "./hostile";
import { useNear } from "./near";
import { saidInCall } from "./records";
import { oneLine } from "./safe";
import type { Segment } from "./segments";
import { changeFigures, type Counterpart, figures, type Span } from "./tokens";
import { signed, TokenView } from "./tokenview";
import type { Turn } from "./tree";
import type { Vocabulary } from "./vocabulary";
import { answererWord, callStateWord, classSentence, classWord, counted, durationWords, figure, finishWord, untrainedWords } from "./words";

interface Props {
  readonly turn: Turn;
  readonly vocabulary: ReadonlySignal<Vocabulary | undefined>;
  /** A token of the completion that is pointed out. */
  readonly marked?: number | undefined;
  /** What another rollout sampled in its place; must be the same function as long as that is the same. */
  readonly counterpart?: (() => Counterpart) | undefined;
}

export function TurnView({ turn, vocabulary, marked, counterpart }: Props) {
  const root = useRef<HTMLElement>(null);
  const isNear = useNear(root);
  const { call } = turn;
  const title = `call ${call.index}`;
  const isUntrained = turn.untrained !== undefined && turn.untrained !== "";
  return (
    <article ref={root} id={`call-${call.callId}`} class={isUntrained ? "turn untrained" : "turn"} aria-label={title}>
      <TurnHead turn={turn} />
      {isNear ? (
        <>
          <NewMessages call={call} />
          <Answer turn={turn} vocabulary={vocabulary} title={title} marked={marked} counterpart={counterpart} />
        </>
      ) : (
        <div class="turn-later" />
      )}
    </article>
  );
}

function TurnHead({ turn }: { turn: Turn }) {
  const { call, untrained } = turn;
  const { completion } = call;
  const versions = versionWords(versionsOf(call));
  const finish = completion ? finishWord(completion.finishReason) : "";
  const isBad = call.state === CallState.FAILED || call.state === CallState.EXPIRED || call.state === CallState.CANCELLED;
  const took = call.receiveTime && call.endTime ? durationWords((timestampMs(call.endTime) - timestampMs(call.receiveTime)) / 1000) : "";
  return (
    <header class="turn-head">
      <span class="turn-number num">{call.index}</span>
      {call.callClass !== CallClass.MAIN && call.callClass !== CallClass.UNSPECIFIED && (
        <span class="chip" title={classSentence(call.callClass)}>
          {classWord(call.callClass)}
        </span>
      )}
      {call.state !== CallState.DELIVERED && (
        <span class={isBad ? "chip bad" : "chip busy"}>
          {callStateWord(call.state)}
          {call.endReason !== "" && `: ${oneLine(call.endReason)}`}
        </span>
      )}
      {untrained !== undefined && untrained !== "" && (
        <span class="chip warn" title={untrainedWords(untrained)}>
          {untrained === "SHARED" ? "trained elsewhere" : "not trained"}
        </span>
      )}
      {call.given && (
        <span class="chip" title="The creator of this branch, or of one that it comes from, gave the answer. It is never trained.">
          given answer
        </span>
      )}
      {call.injected && !call.given && (
        <span class="chip warn" title="The agent was shown another text than the tokens spell, by the trainer.">
          injected
        </span>
      )}
      {call.replayedFrom !== undefined && (
        <span class="chip" title={`Not sampled again: the completion is that of call ${call.replayedFrom.callId}.`}>
          {call.replayedFrom.rolloutId === call.rolloutId ? `replayed from attempt ${call.replayedFrom.attempt}` : "from its parent"}
        </span>
      )}
      {call.branchPoint && (
        <span class="chip" title="Calls before it have the answers of the rollout of which this one is a branch.">
          branches here
        </span>
      )}
      {finish.startsWith("cut") && <span class="chip warn">{finish}</span>}
      <span class="turn-facts muted num">
        {versions !== "" && <span title="policy version">{versions}</span>}
        <span title={`${call.promptCount} tokens of prompt, ${call.promptSharedCount} of them known from the call before`}>
          {call.promptCount.toLocaleString("en")} → {(completion?.span?.count ?? Number(completion?.usage?.completionTokens ?? 0)).toLocaleString("en")} tokens
        </span>
        {took !== "" && <span title="from the agent's request to its answer">{took}</span>}
        <span>{answererWord(call.answerer)}</span>
      </span>
      {call.state === CallState.DELIVERED && (
        <button type="button" class="button quiet" onClick={() => askToBranch(call)}>
          continue from here
        </button>
      )}
    </header>
  );
}

/** The new messages of the agent's request, read when the turn comes into view. */
function NewMessages({ call }: { call: Call }) {
  const said = useSignal<readonly Said[] | undefined>(undefined);
  const trouble = useSignal("");
  useEffect(() => {
    const abort = new AbortController();
    saidInCall(call, abort.signal).then(
      (messages) => {
        said.value = messages;
      },
      (error: unknown) => {
        if (!isCancelled(error)) trouble.value = explain(error, "read the agent's request").title;
      },
    );
    return () => abort.abort();
  }, [call.callId]);
  if (trouble.value !== "") return <p class="muted said-trouble">{trouble.value}.</p>;
  if (!said.value) return <p class="muted said-trouble">…</p>;
  return <Messages messages={said.value} />;
}

/** A request may hold any number of messages and parts: of each only as many are made as somebody asked to see. */
function Messages({ messages }: { messages: readonly Said[] }) {
  const [most, setMost] = useState(FIRST_PARTS);
  const { shown, hiddenMessages, hiddenParts } = useMemo(() => beginning(messages, most), [messages, most]);
  return (
    <>
      {shown.map((message, index) => (
        <MessageView key={index} message={message} />
      ))}
      {(hiddenMessages > 0 || hiddenParts > 0) && (
        <More hidden={`${counted(hiddenMessages, "message")} with ${counted(hiddenParts, "part")}`} onMore={() => setMost(most + FIRST_PARTS)} />
      )}
    </>
  );
}

/** Says what is not shown, and shows more of it. */
function More({ hidden, onMore }: { hidden: string; onMore: () => void }) {
  return (
    <div class="hostile-more">
      <span class="muted num">{hidden} not shown</span>
      <button type="button" class="button" onClick={onMore}>
        Show more
      </button>
    </div>
  );
}

function MessageView({ message }: { message: Said }) {
  const isFolded = message.role === "system" || message.role === "developer";
  const body = () => message.parts.map((part, index) => <PartView key={index} part={part} role={message.role} />);
  if (!isFolded) {
    return (
      <section class={`said said-${known(message.role)}`}>
        <h4>{oneLine(message.role, 24)}</h4>
        {message.parts.length > 0 ? body() : <p class="muted">nothing</p>}
      </section>
    );
  }
  const length = message.parts.reduce((sum, part) => sum + part.text.length, 0);
  return (
    <Fold
      class="said said-system"
      summary={
        <>
          <h4>{oneLine(message.role, 24)}</h4> <span class="muted num">{counted(length, "character")}</span>
        </>
      }
    >
      {body}
    </Fold>
  );
}

const ROLES = new Set(["user", "tool", "assistant", "system", "developer"]);
/** A role as the name of a class: only those that there are. */
const known = (role: string): string => (ROLES.has(role) ? role : "other");

function PartView({ part, role }: { part: SaidPart; role: string }) {
  switch (part.kind) {
    case "image":
      return <p class="muted">an image{part.name !== "" && part.name !== "image" ? ` (${oneLine(part.name, 40)})` : ""}</p>;
    case "tool_call":
      return (
        <div class="tool-call">
          <h5>calls {oneLine(part.name, 80)}</h5>
          <HostileText text={part.text} label={`arguments of ${role}`} />
        </div>
      );
    case "reasoning":
      return (
        <Fold class="reasoning" summary="reasoning">
          {() => <HostileText text={part.text} label="reasoning" prose />}
        </Fold>
      );
    default:
      return <HostileText text={part.text} label={`${role} message`} prose={part.kind === "text" && role !== "tool"} />;
  }
}

interface AnswerProps {
  readonly turn: Turn;
  readonly vocabulary: ReadonlySignal<Vocabulary | undefined>;
  readonly title: string;
  readonly marked: number | undefined;
  readonly counterpart: (() => Counterpart) | undefined;
}

function Answer({ turn, vocabulary, title, marked, counterpart }: AnswerProps) {
  const { call, untrained } = turn;
  const words = vocabulary.value;
  const parts = useMemo(() => partsOf(call), [call]);
  const other = useMemo(() => counterpart?.(), [counterpart]);
  const span = useMemo(() => {
    const own = spanOf(call, words, untrained);
    return own && other ? { ...own, counterpart: other } : own;
  }, [call, words, untrained, other]);
  const made = useMemo(() => (span && words ? segmentsOf(span, parts) : []), [span, words, parts]);
  const [most, setMost] = useState(FIRST_PARTS);
  if (!call.completion) return null;
  const isSpelled = span !== undefined && words !== undefined;
  const reach = marked === undefined ? 0 : made.findIndex((segment) => marked < segment.end) + 1;
  const shown = Math.max(most, reach);
  const hidden = Math.max(0, (isSpelled ? made.length : parts.length) - shown);
  return (
    <section class="said said-model">
      <h4>
        model <SpanFigures span={span} /> <ChangeFigures span={span} />
      </h4>
      {isSpelled ? (
        made.slice(0, shown).map((segment) => (
          <SegmentView key={segment.start} segment={segment} part={parts[segment.part]} span={span} title={title} marked={marked} />
        ))
      ) : (
        <>
          {parts.slice(0, shown).map((part, index) => (
            <PartView key={index} part={part} role="model" />
          ))}
          {span && (
            <Fold class="token-ids" isOpen={marked !== undefined} summary={counted(span.ids.length, "token id")}>
              {() => <TokenView span={span} from={0} to={span.ids.length} title={title} marked={marked} />}
            </Fold>
          )}
        </>
      )}
      {hidden > 0 && <More hidden={counted(hidden, "part")} onMore={() => setMost(shown + FIRST_PARTS)} />}
    </section>
  );
}

function SpanFigures({ span }: { span: Span | undefined }) {
  const found = figures(span?.logprobs);
  if (!found) return null;
  return (
    <span class="muted num" title="mean logprob of its tokens, and perplexity">
      {figure(found.mean)} nats a token, perplexity {figure(found.perplexity)}
    </span>
  );
}

function ChangeFigures({ span }: { span: Span | undefined }) {
  const found = span && changeFigures(span);
  if (!span || !found) return null;
  const title = "of the tokens before which both have the same tokens: how much more likely they became, from left to right";
  return (
    <span class="muted num change-figures">
      {found.same.toLocaleString("en")} of {counted(span.ids.length, "token")} in both
      {found.compared > 0 && (
        <span title={title}>
          ; right − left {signed(found.mean)} nats a token over {found.compared.toLocaleString("en")}
        </span>
      )}
    </span>
  );
}

function SegmentView({ segment, part, span, title, marked }: { segment: Segment; part: SaidPart | undefined; span: Span; title: string; marked: number | undefined }) {
  const isMarked = marked !== undefined && marked >= segment.start && marked < segment.end;
  const view = () => <TokenView span={span} from={segment.start} to={segment.end} title={title} marked={isMarked ? marked : undefined} />;
  if (segment.kind === "reasoning") {
    return (
      <Fold
        class="reasoning"
        isOpen={isMarked}
        summary={
          <>
            reasoning <span class="muted num">{counted(segment.end - segment.start, "token")}</span>
          </>
        }
      >
        {view}
      </Fold>
    );
  }
  if (segment.kind === "tool_call") {
    return (
      <div class="tool-call">
        <h5>calls {oneLine(part?.name ?? "", 80)}</h5>
        {view()}
      </div>
    );
  }
  return view();
}
