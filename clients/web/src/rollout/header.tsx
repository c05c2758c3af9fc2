/** The head of a rollout's page: what it is, how it stands, how it ended and whose doing that was. */

import { timestampDate, timestampMs } from "@bufbuild/protobuf/wkt";
import type { ComponentChildren } from "preact";
import { type Failure, FailureCause, Phase, type Rollout } from "@gen/penstock/driver/v1/rollout_pb";
import { shortId } from "../lib/format";
import { href } from "../lib/router";
import { DEFAULT_NAMESPACE } from "../overview/board";
import { refOf } from "../run/model";
import { versionsPlace } from "../tasks/versions";
import { askToCancel } from "../ui/cancel";
import { CopyId } from "../ui/copyid";
import { rolloutName } from "../ui/name";
import { versionsOf, versionWords } from "./completion";
import { HostileText } from "./hostile";
import type { Capture } from "./records";
import { oneLine } from "./safe";
import { useNow } from "./timeline";
import { int32 } from "./tokens";
import { causeSentence, durationWords, figure, modeWord, partyWords, phaseWord, standsWords, trainingSentence } from "./words";

export function StateChip({ rollout }: { rollout: Rollout }) {
  if (rollout.phase !== Phase.ENDED) return <span class="chip busy">{standsWords(rollout)}</span>;
  const failure = rollout.outcome?.failure;
  if (failure?.cause === FailureCause.CANCELLED) return <span class="chip warn">cancelled</span>;
  return failure ? <span class="chip bad">failed</span> : <span class="chip good">completed</span>;
}

interface Props {
  readonly rollout: Rollout;
  readonly capture: Capture;
  readonly siblings: readonly string[];
}

export function Header({ rollout, capture, siblings }: Props) {
  const isRunning = rollout.phase !== Phase.ENDED;
  const { groupId } = rollout;
  return (
    <header class="rollout-head">
      <div class="rollout-title">
        <h1>
          <span class="muted">Rollout</span> <bdi title={rollout.rolloutId}>{nameOf(rollout)}</bdi>
        </h1>
        <StateChip rollout={rollout} />
        <CopyId id={rollout.rolloutId} />
        {rollout.attempts > 1 && <span class="chip warn">attempt {rollout.attempts}</span>}
        <span class="grow" />
        {rollout.spec?.task?.taskId && capture.calls.some((call) => !call.policyId && versionsOf(call).length > 0) && <OtherVersions rollout={rollout} />}
        {groupId !== undefined && <Siblings rollout={rollout} groupId={groupId} siblings={siblings} />}
        {isRunning && (
          <button type="button" class="button danger" onClick={() => askToCancel("rollout", rollout.rolloutId)}>
            Cancel rollout
          </button>
        )}
      </div>
      {rollout.branchedFrom && (
        <p>
          A branch of{" "}
          <a href={href("/rollouts", rollout.branchedFrom.parentRolloutId)}>
            <code>{oneLine(rollout.branchedFrom.parentRolloutId, 140)}</code>
          </a>{" "}
          at call {rollout.branchedFrom.callIndex}
          {rollout.branchedFrom.answerGiven && ", whose answer was given"}.
        </p>
      )}
      {rollout.outcome?.failure && <FailureNotice failure={rollout.outcome.failure} />}
      <Facts rollout={rollout} capture={capture} />
    </header>
  );
}

function nameOf({ rolloutId, spec, groupId, index }: Rollout): string {
  return rolloutName({ id: rolloutId, task: spec?.task?.taskId ?? "", agent: spec?.agent?.name ?? "", group: groupId ?? "", index });
}

function OtherVersions({ rollout: { rolloutId, spec, namespace } }: { rollout: Rollout }) {
  const run = spec?.runId ? refOf({ run: spec.runId, namespace: namespace || DEFAULT_NAMESPACE }) : "";
  return (
    <a class="button" href={versionsPlace(spec?.task?.taskId ?? "", { run, agent: spec?.agent?.name ?? "", left: rolloutId })}>
      Compare versions
    </a>
  );
}

function Siblings({ rollout, groupId, siblings }: { rollout: Rollout; groupId: string; siblings: readonly string[] }) {
  const at = siblings.indexOf(rollout.rolloutId);
  const before = siblings[at - 1];
  const after = at < 0 ? undefined : siblings[at + 1];
  return (
    <div class="siblings" role="group" aria-label="Siblings of the group">
      {before !== undefined && (
        <a class="button" href={href("/rollouts", before)} aria-label="The sibling before">
          ←
        </a>
      )}
      <a class="button" href={`${href("/groups", groupId)}?left=${encodeURIComponent(rollout.rolloutId)}`}>
        {siblings.length > 0 ? `${at + 1} of ${siblings.length}: compare` : "Compare siblings"}
      </a>
      {after !== undefined && (
        <a class="button" href={href("/rollouts", after)} aria-label="The next sibling">
          →
        </a>
      )}
    </div>
  );
}

export function FailureNotice({ failure }: { failure: Failure }) {
  const by = partyWords(failure.causedBy);
  return (
    <div class="notice bad failure">
      <div class="grow">
        <p>
          <strong>{causeSentence(failure.cause)}</strong> while {phaseWord(failure.phase)} <code>{oneLine(failure.reason, 80)}</code>
          {failure.retriable && <span class="chip warn">may be tried again</span>}
        </p>
        <HostileText text={failure.message} label="why it failed" prose />
        <p class="muted">
          {by !== "" && `Caused by ${by}. `}
          {trainingSentence(failure.cause)}
        </p>
      </div>
    </div>
  );
}

function Facts({ rollout, capture }: { rollout: Rollout; capture: Capture }) {
  const isRunning = rollout.phase !== Phase.ENDED;
  const now = useNow(isRunning);
  const start = rollout.createTime ? timestampMs(rollout.createTime) : undefined;
  const end = rollout.endTime ? timestampMs(rollout.endTime) : now;
  const sampled = capture.calls.reduce((sum, call) => sum + (call.completion?.span?.count ?? Number(call.completion?.usage?.completionTokens ?? 0)), 0);
  // Prompt tokens that were new: what a conversation repeats is reckoned once.
  const read = capture.calls.reduce((sum, call) => sum + int32(call.promptSuffixTokenIds).length, 0);
  const versions = versionWords([...new Set(capture.calls.flatMap(versionsOf))].sort((a, b) => (a < b ? -1 : 1)));
  const reward = rollout.outcome?.reward;
  return (
    <dl class="facts">
      <Fact name="Reward" isBig={reward !== undefined}>
        {reward ? figure(reward.value) : isRunning ? "–" : "not graded"}
      </Fact>
      <Fact name="Agent">{oneLine(rollout.spec?.agent?.name ?? "", 60)}</Fact>
      <Fact name="Task">{oneLine(rollout.spec?.task?.taskId ?? "", 60)}</Fact>
      <Fact name="Mode">{modeWord(rollout.spec?.mode ?? 0)}</Fact>
      <Fact name="Policy">{versions === "" ? "–" : versions}</Fact>
      <Fact name="Calls">{capture.calls.length.toLocaleString("en")}</Fact>
      <Fact name="Tokens" title="new prompt tokens, and sampled ones">
        {read.toLocaleString("en")} + {sampled.toLocaleString("en")}
      </Fact>
      <Fact name={isRunning ? "Running for" : "Took"}>{start === undefined ? "" : durationWords((end - start) / 1000)}</Fact>
      <Fact name="Started">{rollout.createTime ? timestampDate(rollout.createTime).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : ""}</Fact>
      {homeOf(rollout).map(({ what, name }) => (
        <Fact key={what} name={what} title={name}>
          <code>{shortId(oneLine(name, 60), 20)}</code>
        </Fact>
      ))}
    </dl>
  );
}

/** The services that have a rollout, and its sandbox, as far as they are known. */
function homeOf({ home }: Rollout): { what: string; name: string }[] {
  return [
    { what: "Driver", name: home?.driver ?? "" },
    { what: "Gate", name: home?.gate ?? "" },
    { what: "Sandbox service", name: home?.sandboxService ?? "" },
    { what: "Sandbox", name: home?.sandboxId ?? "" },
  ].filter(({ name }) => name !== "");
}

function Fact({ name, children, isBig = false, title }: { name: string; children: ComponentChildren; isBig?: boolean; title?: string }) {
  return (
    <div class={isBig ? "fact fact-big" : "fact"} title={title}>
      <dt>{name}</dt>
      <dd class="num">{children}</dd>
    </div>
  );
}
