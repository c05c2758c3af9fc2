/** Files: what the agent changed, and the artifacts that were fetched. */

import type { Rollout, RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { DiffView } from "./diffview";
import { Fold } from "./fold";
import { HostileText } from "./hostile";
import { byteCount, decoded, oneLine } from "./safe";
import { counted } from "./words";

/** Of the artifact that a task with keep_diff gives. */
const DIFF_NAME = "changes.diff";

export function FilesView({ events, rollout }: { events: readonly RolloutEvent[]; rollout: Rollout }) {
  const artifacts = events.flatMap(({ event }) => (event.case === "artifact" ? [event.value] : []));
  const taken = rollout.outcome?.grading?.changes;
  const isKept = rollout.spec?.task?.keepDiff === true;
  return (
    <div class="files">
      {!isKept && (
        <p class="muted">
          What the agent changed was not asked for: <code>keep_diff: true</code> in the task keeps it as a diff.
        </p>
      )}
      {isKept && artifacts.every((artifact) => artifact.name !== DIFF_NAME) && (
        <p class="muted">The diff is made when the agent is dead. Where it cannot be made, the events say why.</p>
      )}
      {taken && (
        <p>
          The fresh fork got {counted(taken.entries, "path")} ({byteCount(Number(taken.sizeBytes))}) that the agent changed
          {taken.removed > 0 && <>, and {counted(taken.removed, "path")} fewer</>}.
        </p>
      )}
      {artifacts.map((artifact, index) => (
        <Fold
          key={index}
          class="artifact"
          isOpen={artifacts.length === 1}
          summary={
            <>
              <code>{oneLine(artifact.name)}</code>{" "}
              <span class="muted num">
                {byteCount(Number(artifact.sizeBytes))}
                {artifact.truncated ? `, the first ${byteCount(artifact.content.length)} are kept` : ""}
              </span>
            </>
          }
        >
          {() => (/\.(diff|patch)$/u.test(artifact.name) ? <DiffView text={decoded(artifact.content)} /> : <HostileText text={artifact.content} label={artifact.name} />)}
        </Fold>
      ))}
    </div>
  );
}
