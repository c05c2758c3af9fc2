// Asks once more before a rollout or a group is cancelled, and says what became of it.
import { signal } from "@preact/signals";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";

import { explain, type Trouble } from "../lib/errors";
import { driverOf } from "../lib/members";
import { CANCEL_MS, client } from "../lib/transport";
import { Sheet } from "./dialogs";
import { TroubleNotice } from "./notice";

interface Wanted {
  readonly kind: "rollout" | "group";
  readonly id: string;
}

/** The reason of who gives none. */
const UNSAID = "cancelled on the dashboard";
const open = signal(false);
const wanted = signal<Wanted | null>(null);
const trouble = signal<Trouble | null>(null);
const busy = signal(false);

/** Opens the question. */
export function askToCancel(kind: Wanted["kind"], id: string): void {
  wanted.value = { kind, id };
  trouble.value = null;
  open.value = true;
}

async function cancel(reason: string): Promise<void> {
  const what = wanted.value;
  if (!what) return;
  busy.value = true;
  trouble.value = null;
  const driver = client(RolloutService, driverOf(what.id));
  const options = { timeoutMs: CANCEL_MS };
  try {
    if (what.kind === "group") await driver.cancelGroup({ groupId: what.id, reason: reason || UNSAID }, options);
    else await driver.cancelRollout({ rolloutId: what.id, reason: reason || UNSAID }, options);
    open.value = false;
  } catch (error) {
    trouble.value = explain(error, `cancel the ${what.kind}`);
  } finally {
    busy.value = false;
  }
}

/** The question. To be rendered once on each page that asks it. */
export function CancelSheet() {
  const what = wanted.value;
  return (
    <Sheet open={open} title={`Cancel this ${what?.kind ?? "rollout"}?`}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void cancel(String(new FormData(event.currentTarget).get("reason") ?? ""));
        }}
      >
        <p>
          <code>{what?.id}</code>
        </p>
        <p class="muted">Agents are killed and sandboxes removed before this is done. What was captured stays.</p>
        <input class="field" name="reason" placeholder="Why, for the record" aria-label="Reason" autocomplete="off" />
        {trouble.value && <TroubleNotice trouble={trouble.value} />}
        <div class="actions">
          <button type="button" class="button" onClick={() => (open.value = false)}>
            Let it run
          </button>
          <button type="submit" class="button danger" disabled={busy.value}>
            {busy.value ? "Cancelling…" : `Cancel the ${what?.kind ?? "rollout"}`}
          </button>
        </div>
      </form>
    </Sheet>
  );
}
