/** How a sibling stands, as a chip; of one that failed the reason, which sets it apart from the others. */

import { FailureCause, Phase, type RolloutSummary } from "@gen/penstock/driver/v1/rollout_pb";
import { oneLine } from "../rollout/safe";
import { causeSentence, standsWords } from "../rollout/words";

export function End({ rollout }: { rollout: RolloutSummary }) {
  const { failure } = rollout;
  if (rollout.phase !== Phase.ENDED) return <span class="chip busy">{standsWords(rollout)}</span>;
  if (!failure) return <span class="chip good">completed</span>;
  const isCancelled = failure.cause === FailureCause.CANCELLED;
  return (
    <span class={isCancelled ? "chip warn" : "chip bad"} title={`${causeSentence(failure.cause)}. ${oneLine(failure.message, 200)}`}>
      {isCancelled ? "cancelled" : oneLine(failure.reason, 40)}
    </span>
  );
}
