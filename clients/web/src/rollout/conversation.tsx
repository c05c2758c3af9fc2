/** The conversation as a tree: the main line, and the branches where they leave it. */

import type { ReadonlySignal } from "@preact/signals";
import { CallClass } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { HostileText } from "./hostile";
import { oneLine } from "./safe";
import { type TreeBranch, type Turn } from "./tree";
import { TurnView } from "./turn";
import type { Vocabulary } from "./vocabulary";
import { classSentence, classWord, counted } from "./words";

interface Props {
  readonly roots: readonly TreeBranch[];
  readonly vocabulary: ReadonlySignal<Vocabulary | undefined>;
}

export function Conversation({ roots, vocabulary }: Props) {
  const [first, ...others] = roots;
  if (!first) return null;
  return (
    <div class="conversation">
      {/* One root is the conversation itself and needs no heading; of several each says what it is. */}
      {others.length === 0 && first.branchClass === CallClass.MAIN ? (
        <Turns turns={first.turns} vocabulary={vocabulary} />
      ) : (
        roots.map((branch) => <BranchView key={branch.id} branch={branch} vocabulary={vocabulary} isOpen={branch === first || isOpening(branch)} />)
      )}
    </div>
  );
}

/** Titles and probes are what nobody came for. */
function isOpening(branch: TreeBranch): boolean {
  return branch.branchClass !== CallClass.TITLE && branch.branchClass !== CallClass.PROBE && branch.branchClass !== CallClass.RETRY;
}

function BranchView({ branch, vocabulary, isOpen }: { branch: TreeBranch; vocabulary: Props["vocabulary"]; isOpen: boolean }) {
  return (
    <details class={`branch branch-${branch.branchClass}`} open={isOpen}>
      <summary>
        <span class="branch-label" title={classSentence(branch.branchClass)}>
          {classWord(branch.branchClass)}
        </span>
        <span class="muted num">{counted(branch.turns.length, "call")}</span>
        {branch.shared > 0 && <span class="muted num">shares {counted(branch.shared, "token")}</span>}
        {branch.isDeeper && <span class="muted">left a branch before this one</span>}
        {branch.reason !== "" && <span class="branch-reason muted">{oneLine(branch.reason, 160)}</span>}
      </summary>
      {branch.reason.length > 160 && <HostileText text={branch.reason} label="why the branch opened" prose />}
      <Turns turns={branch.turns} vocabulary={vocabulary} />
    </details>
  );
}

function Turns({ turns, vocabulary }: { turns: readonly Turn[]; vocabulary: Props["vocabulary"] }) {
  return (
    <>
      {turns.map((turn) => (
        <div key={turn.call.callId} class="turn-group">
          <TurnView turn={turn} vocabulary={vocabulary} />
          {turn.branches.map((branch) => (
            <BranchView key={branch.id} branch={branch} vocabulary={vocabulary} isOpen={isOpening(branch)} />
          ))}
        </div>
      ))}
    </>
  );
}
