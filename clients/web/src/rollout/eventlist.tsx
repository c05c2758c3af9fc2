/** What happened, as it happens: the events of a rollout, the newest last. */

import { durationMs, timestampDate } from "@bufbuild/protobuf/wkt";
import type { JsonObject } from "@bufbuild/protobuf";
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { AgentEventKind } from "@gen/penstock/driver/v1/agent_pb";
import { FailureCause, type RolloutEvent, type UserTurn } from "@gen/penstock/driver/v1/rollout_pb";
import { CommandView, commandLine } from "./commands";
import { DiffView } from "./diffview";
import { Fold } from "./fold";
import { HostileText } from "./hostile";
import { byteCount, decoded, oneLine } from "./safe";
import { agentEventWord, callStateWord, classWord, durationWords, exitOk, exitWords, phaseWord } from "./words";

const PAGE = 200;

export function EventList({ events, dropped }: { events: readonly RolloutEvent[]; dropped: number }) {
  const [shown, setShown] = useState(PAGE);
  const earlier = Math.max(0, events.length - shown);
  if (events.length === 0) return <p class="muted">Nothing has happened yet.</p>;
  return (
    <div class="events">
      {dropped > 0 && <p class="muted num">{dropped.toLocaleString("en")} older events are not kept by the page.</p>}
      {earlier > 0 && (
        <button type="button" class="button" onClick={() => setShown(shown + PAGE * 2)}>
          Show earlier events ({earlier.toLocaleString("en")})
        </button>
      )}
      <ol>
        {events.slice(earlier).map((event) => (
          <EventRow key={String(event.sequence)} event={event} />
        ))}
      </ol>
    </div>
  );
}

function EventRow({ event }: { event: RolloutEvent }) {
  const said = told(event);
  const time = event.time ? timestampDate(event.time) : undefined;
  return (
    <li class={`event ${said.look}`}>
      <time class="muted num" dateTime={time?.toISOString()} title={time?.toLocaleString()}>
        {time?.toLocaleTimeString([], { hour12: false })}
      </time>
      <div class="event-body">
        {said.more === undefined ? (
          said.line
        ) : (
          <Fold summary={said.line}>{said.more}</Fold>
        )}
      </div>
    </li>
  );
}

interface Told {
  readonly line: ComponentChildren;
  readonly look: string;
  readonly more?: () => ComponentChildren;
}

function told({ event }: RolloutEvent): Told {
  switch (event.case) {
    case "phaseChanged":
      return { line: <strong>{phaseWord(event.value.phase)}</strong>, look: "event-phase" };
    case "progress":
      return { line: <span class="muted">{oneLine(event.value.message, 200)}</span>, look: "" };
    case "commandFinished": {
      const command = event.value;
      return {
        line: (
          <>
            <code>{oneLine(commandLine(command.command), 120)}</code> <ExitChip ok={exitOk(command.exit)} words={exitWords(command.exit)} />
          </>
        ),
        look: "",
        more: () => <CommandView exit={command.exit} command={commandLine(command.command)} stdout={command.stdoutTail} stderr={command.stderrTail} />,
      };
    }
    case "agentEvent":
      return agentEvent(event.value.kind, event.value.data, event.value.rawLine);
    case "callFinished": {
      const { call, recordedCount, replayedCount } = event.value;
      if (!call) return { line: "a model call ended", look: "" };
      const count = call.completion?.span?.count ?? 0;
      return {
        line: (
          <span class="muted num">
            model call {call.index} ({classWord(call.callClass)}): {callStateWord(call.state)}, {call.promptCount} → {count} tokens
            {(call.given || call.replayedFrom !== undefined) && `, ${call.given ? "given" : "replayed"}`}
            {recordedCount > 0 && (call.given || call.replayedFrom !== undefined) && ` (${replayedCount} of ${recordedCount})`}
          </span>
        ),
        look: "",
      };
    }
    case "artifact": {
      const artifact = event.value;
      return {
        line: (
          <>
            artifact <code>{oneLine(artifact.name)}</code>{" "}
            <span class="muted num">
              {byteCount(Number(artifact.sizeBytes))}
              {artifact.truncated ? ", cut" : ""}
            </span>
          </>
        ),
        look: "",
        more: () =>
          /\.(diff|patch)$/u.test(artifact.name) ? <DiffView text={decoded(artifact.content)} /> : <HostileText text={artifact.content} label={artifact.name} />,
      };
    }
    case "agentExited":
      return {
        line: (
          <>
            the agent ended: <ExitChip ok={exitOk(event.value.exit)} words={exitWords(event.value.exit)} />
          </>
        ),
        look: "",
        ...(event.value.stderrTail.length > 0 && { more: () => <HostileText text={event.value.stderrTail} label="standard error of the agent" /> }),
      };
    case "attemptFailed":
      return {
        line: (
          <>
            attempt {event.value.attempt} failed ({oneLine(event.value.failure?.reason ?? "")}); it is retried
          </>
        ),
        look: "event-bad",
        more: () => <HostileText text={event.value.failure?.message ?? ""} label="why the attempt failed" prose />,
      };
    case "paused": {
      const { reason, maxDuration } = event.value;
      const most = maxDuration ? ` for at most ${durationWords(durationMs(maxDuration) / 1000)}` : "";
      return { line: `paused${most}${reason === "" ? "" : `: ${oneLine(reason, 200)}`}`, look: "event-phase" };
    }
    case "resumed": {
      const { reason, pausedTime } = event.value;
      const after = pausedTime ? ` after ${durationWords(durationMs(pausedTime) / 1000)}` : "";
      return { line: `goes on${after}${reason === "" ? "" : ` (${oneLine(reason, 80)})`}`, look: "event-phase" };
    }
    case "userTurn":
      return userTurn(event.value);
    case "ended": {
      const { failure } = event.value;
      if (!failure) return { line: <strong>completed</strong>, look: "event-good" };
      const isCancelled = failure.cause === FailureCause.CANCELLED;
      return { line: <strong>{`${isCancelled ? "cancelled" : "failed"}: ${oneLine(failure.reason)}`}</strong>, look: isCancelled ? "" : "event-bad" };
    }
    default:
      return { line: <span class="muted">an event that this page does not know: the services are newer</span>, look: "" };
  }
}

/** What the user answered the agent; all of both texts is folded away. */
function userTurn({ index, agentMessage, instruction, endReason }: UserTurn): Told {
  return {
    line: endReason === "" ? `the user's instruction ${index}: ${oneLine(instruction, 160)}` : `the user ends the conversation (${oneLine(endReason, 80)})`,
    look: "",
    more: () => (
      <>
        {endReason === "" && <HostileText text={instruction} label="the user's instruction" prose />}
        <p class="muted">The agent's last message, to which this is the answer:</p>
        <HostileText text={agentMessage} label="the agent's last message" prose />
      </>
    ),
  };
}

function agentEvent(kind: AgentEventKind, data: JsonObject | undefined, raw: Uint8Array): Told {
  const text = textOf(data) ?? decoded(raw);
  const isError = kind === AgentEventKind.ERROR;
  return {
    line: (
      <>
        <span class={isError ? "chip bad" : "chip"}>{agentEventWord(kind)}</span> <span class={kind === AgentEventKind.OTHER ? "muted" : ""}>{oneLine(text, 160)}</span>
      </>
    ),
    look: isError ? "event-bad" : "",
    more: () => (
      <>
        <HostileText text={text} label={`what the agent ${agentEventWord(kind)}`} />
        <Fold summary={<span class="muted">the line as the agent wrote it</span>}>{() => <HostileText text={raw} label="line of the agent" />}</Fold>
      </>
    ),
  };
}

/** What an event says, by the conventions of specs: text, message, or a tool with its arguments or output. */
function textOf(data: JsonObject | undefined): string | undefined {
  if (!data) return undefined;
  const plain = data["text"] ?? data["message"];
  if (typeof plain === "string") return plain;
  const name = typeof data["name"] === "string" ? `${data["name"]} ` : "";
  const content = data["arguments"] ?? data["output"] ?? data["reason"];
  if (content === undefined) return undefined;
  return name + (typeof content === "string" ? content : JSON.stringify(content));
}

export function ExitChip({ ok, words }: { ok: boolean; words: string }) {
  return <span class={ok ? "chip good" : "chip bad"}>{words}</span>;
}

