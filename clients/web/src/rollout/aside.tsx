/** Beside the conversation: why the reward is what it is, what setup and verifier did, the task, how far the capture may be trusted. */

import type { ComponentChildren } from "preact";
import { Finding_Severity, Grade } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { Phase, type Rollout, type RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { CommandView, commandLine } from "./commands";
import { Fold } from "./fold";
import { HostileText } from "./hostile";
import type { Capture } from "./records";
import { explainReward, judgements } from "./reward";
import { oneLine } from "./safe";
import { captureStanding } from "./standing";
import { counted, exitOk, exitWords, figure } from "./words";

export function Panel({ title, children, id }: { title: string; children: ComponentChildren; id?: string }) {
  return (
    <section class="panel card" id={id} aria-label={title}>
      <h2>{title}</h2>
      {children}
    </section>
  );
}

export function RewardPanel({ rollout, capture }: { rollout: Rollout; capture: Capture }) {
  const { outcome } = rollout;
  const found = explainReward(outcome, rollout.spec?.task?.verifier, rollout.phase);
  return (
    <Panel title="Reward">
      <div class="reward">
        <strong class="reward-value num">{found.headline}</strong>
        {found.share !== undefined && outcome?.reward && (
          <div class="reward-range">
            <div class="bar" role="meter" aria-label="Where in its range the reward lies" aria-valuemin={0} aria-valuemax={1} aria-valuenow={found.share}>
              <div style={{ width: `${Math.min(100, Math.max(0, found.share * 100))}%` }} />
            </div>
            <div class="muted num reward-ends">
              <span>{figure(outcome.reward.rangeMin)}</span>
              <span>{figure(outcome.reward.rangeMax)}</span>
            </div>
          </div>
        )}
      </div>
      {found.sentences.map((sentence) => (
        <p key={sentence}>{sentence}</p>
      ))}
      {found.components.length > 0 && (
        <table class="components">
          <thead>
            <tr>
              <th>component</th>
              <th class="right">value</th>
              <th class="right">range</th>
            </tr>
          </thead>
          <tbody>
            {found.components.map((component) => (
              <tr key={component.name}>
                <td>{oneLine(component.name)}</td>
                <td class="right num">{figure(component.value)}</td>
                <td class="right num muted">{component.range}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      <Judgements rollout={rollout} capture={capture} />
      <LeftOut rollout={rollout} />
    </Panel>
  );
}

function Judgements({ rollout, capture }: { rollout: Rollout; capture: Capture }) {
  const { shown, whole } = judgements(rollout.outcome, capture.annotations, capture.calls);
  if (whole === 0) return null;
  return (
    <Fold summary={`Rewards of turns, and annotations (${whole})`} isOpen={whole <= 8}>
      {() => (
        <>
          <table class="components">
            <thead>
              <tr>
                <th>what, by whom</th>
                <th class="right">call</th>
                <th class="right">value</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((one, index) => (
                <tr key={index}>
                  <td>
                    {one.name !== "" && `${oneLine(one.name)}, `}
                    <span class="muted">{oneLine(one.author)}</span>
                    {one.more !== "" && <div class="muted">{oneLine(one.more)}</div>}
                    {one.details !== "" && <HostileText text={one.details} label="details of an annotation" />}
                  </td>
                  <td class="right num">{one.turn ?? ""}</td>
                  <td class="right num">{one.value === undefined ? "–" : figure(one.value)}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {whole > shown.length && <p class="muted">{whole - shown.length} more are in the trajectory.</p>}
        </>
      )}
    </Fold>
  );
}

function LeftOut({ rollout }: { rollout: Rollout }) {
  const changes = rollout.outcome?.grading?.changes;
  if (!changes || changes.leftOutPaths.length === 0) return null;
  return (
    <Fold summary={`Left-out paths (${changes.leftOut})`}>
      {() => <HostileText text={changes.leftOutPaths.join("\n")} label="paths that were left out" />}
    </Fold>
  );
}

const SUMMARY_CHARACTERS = 60;

/** A command that its heading has not shown already; else nothing. */
const shownWhole = (command: string): string => (command.length > SUMMARY_CHARACTERS || command.includes("\n") ? command : "");

/** Commands of one phase, as their events report them. */
export function CommandsPanel({ title, phase, events, none }: { title: string; phase: Phase; events: readonly RolloutEvent[]; none: string }) {
  const commands = events.flatMap(({ event }) => (event.case === "commandFinished" && event.value.phase === phase ? [event.value] : []));
  return (
    <Panel title={title}>
      {commands.length === 0 && <p class="muted">{none}</p>}
      {commands.map((command, index) => (
        <Fold
          key={index}
          class="command-fold"
          isOpen={!exitOk(command.exit) || commands.length === 1}
          summary={
            <>
              <span class={exitOk(command.exit) ? "chip good" : "chip bad"}>{exitWords(command.exit)}</span> <code>{oneLine(commandLine(command.command), SUMMARY_CHARACTERS)}</code>
            </>
          }
        >
          {() => <CommandView command={shownWhole(commandLine(command.command))} exit={command.exit} stdout={command.stdoutTail} stderr={command.stderrTail} />}
        </Fold>
      ))}
    </Panel>
  );
}

export function TaskPanel({ rollout }: { rollout: Rollout }) {
  const task = rollout.spec?.task;
  const metadata = task?.metadata && Object.keys(task.metadata).length > 0 ? JSON.stringify(task.metadata, null, 2) : "";
  return (
    <Panel title="Task">
      <p>
        <code>{oneLine(task?.taskId ?? "")}</code>
      </p>
      <HostileText text={task?.instruction ?? ""} label="instruction" prose />
      {task !== undefined && task.files.length > 0 && (
        <Fold summary={counted(task.files.length, "file")}>{() => <HostileText text={task.files.map((file) => file.path).join("\n")} label="files of the task" />}</Fold>
      )}
      {metadata !== "" && <Fold summary="metadata">{() => <HostileText text={metadata} label="metadata of the task" />}</Fold>}
    </Panel>
  );
}

const GRADE_LOOKS: Readonly<Record<number, string>> = { [Grade.EXACT]: "chip good", [Grade.USABLE]: "chip warn", [Grade.UNUSABLE]: "chip bad" };

/** Where a replay parts, its finding has two texts of up to 400 characters. */
const MESSAGE_CHARACTERS = 2000;

interface CaptureProps {
  readonly capture: Capture;
  readonly isEnded: boolean;
  /** The calls were read, or there are none to read. */
  readonly isRead: boolean;
}

export function CapturePanel({ capture, isEnded, isRead }: CaptureProps) {
  const standing = captureStanding(capture, isEnded, isRead);
  const trainable = capture.samples.reduce((sum, sample) => sum + sample.lossMask.reduce((count, bit) => count + bit, 0), 0);
  return (
    <Panel title="Capture">
      <p>
        <span class={GRADE_LOOKS[standing.grade] ?? "chip"}>{standing.word}</span> {standing.sentence}
      </p>
      {capture.isWhole && (
        <p class="num">
          {counted(capture.samples.length, "sample")}, {counted(trainable, "trainable token")}
        </p>
      )}
      {standing.findings.length > 0 && (
        <ul class="findings">
          {standing.findings.map((finding, index) => (
            <li key={index} class={finding.severity === Finding_Severity.FATAL ? "finding-bad" : ""}>
              <code>{oneLine(finding.reason)}</code> <span class="muted">{oneLine(finding.message, MESSAGE_CHARACTERS)}</span>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

export function HostToolsPanel({ capture }: { capture: Capture }) {
  if (capture.hostToolCalls.length === 0) return null;
  return (
    <Panel title="Host tools">
      {capture.hostToolCalls.map((call) => (
        <Fold
          key={call.toolCallId}
          summary={
            <>
              <span class={call.isError || call.endReason !== "" ? "chip bad" : "chip"}>{oneLine(call.name, 60)}</span>{" "}
              <span class="muted">{call.endReason !== "" ? oneLine(call.endReason) : call.isError ? "said that it failed" : ""}</span>
            </>
          }
        >
          {() => (
            <>
              <HostileText text={call.argumentsJson} label="arguments of a host tool" />
              {call.resultJson !== "" && <HostileText text={call.resultJson} label="result of a host tool" />}
            </>
          )}
        </Fold>
      ))}
    </Panel>
  );
}
