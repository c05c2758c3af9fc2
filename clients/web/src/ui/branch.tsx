// Asks how many branches continue a rollout from one of its calls, and starts them.
import { signal } from "@preact/signals";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";

import { explain, type Trouble } from "../lib/errors";
import { driverOf } from "../lib/members";
import { go } from "../lib/router";
import { client } from "../lib/transport";
import { Sheet } from "./dialogs";
import { TroubleNotice } from "./notice";

interface Wanted {
  readonly rolloutId: string;
  readonly callId: string;
  readonly index: number;
  readonly requestId: string;
}

const TIMEOUT_MS = 120_000;
const MOST = 256;
const open = signal(false);
const wanted = signal<Wanted | null>(null);
const trouble = signal<Trouble | null>(null);
const busy = signal(false);

/** Opens the question. */
export function askToBranch(rolloutId: string, callId: string, index: number): void {
  wanted.value = { rolloutId, callId, index, requestId: crypto.randomUUID() };
  trouble.value = null;
  open.value = true;
}

async function branch(count: number, answer: string): Promise<void> {
  const what = wanted.value;
  if (!what) return;
  busy.value = true;
  trouble.value = null;
  const { requestId, rolloutId, callId } = what;
  const said = answer === "" ? undefined : { parts: [{ part: { case: "text" as const, value: { text: answer } } }] };
  const request = { requestId, rolloutId, call: { case: "callId" as const, value: callId }, count, answer: said };
  try {
    const { group } = await client(RolloutService, driverOf(rolloutId)).branchRollout(request, { timeoutMs: TIMEOUT_MS });
    open.value = false;
    go("/groups", group?.groupId ?? "");
  } catch (error) {
    trouble.value = explain(error, "continue from this call");
    // What was refused was not remembered, and may be asked otherwise.
    wanted.value = { ...what, requestId: crypto.randomUUID() };
  } finally {
    busy.value = false;
  }
}

/** The question. To be rendered once on each page that asks it. */
export function BranchSheet() {
  const what = wanted.value;
  return (
    <Sheet open={open} title={`Continue from call ${what?.index ?? 0}`}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const form = new FormData(event.currentTarget);
          void branch(Number(form.get("count") ?? 1), String(form.get("answer") ?? ""));
        }}
      >
        <p class="muted">
          Each branch has a sandbox of its own. Its agent gets this rollout's answers up to the call, without sampling; from there on the model is asked. In gate mode a
          trainer has to answer, or <code>penstock branch</code>.
        </p>
        <label>
          Branches <input class="field" name="count" type="number" min={1} max={MOST} defaultValue="8" required />
        </label>
        <label>
          Answer of the call <textarea class="field" name="answer" rows={3} placeholder="Empty: the model is asked" />
        </label>
        {trouble.value && <TroubleNotice trouble={trouble.value} />}
        <div class="actions">
          <button type="button" class="button" onClick={() => (open.value = false)}>
            Close
          </button>
          <button type="submit" class="button primary" disabled={busy.value}>
            {busy.value ? "Starting…" : "Start the branches"}
          </button>
        </div>
      </form>
    </Sheet>
  );
}
