/** What a watch of rollouts says. */

import type { RolloutSummary } from "../gen/penstock/driver/v1/rollout_pb.js";

/** States of rollouts at one moment. */
export interface RolloutChanges {
  readonly rollouts: readonly RolloutSummary[];
  /**
   * Those that were given and match no more, or were deleted. After a driver was away, also a rollout that ended meanwhile and is
   * beyond `endedLimit`; when a driver leaves the installation, all of its rollouts.
   */
  readonly gone: readonly string[];
  /** True once all that existed at the start were given, this message included. */
  readonly complete: boolean;
  /** Names of the drivers that cannot be watched now: what these have is not known. */
  readonly away: readonly string[];
}
