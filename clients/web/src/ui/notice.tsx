// Says what does not work, and what to do; nothing while all is well.
import type { ReadonlySignal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";

import type { Trouble } from "../lib/errors";
import type { Following, Health } from "../lib/follow";
import { clockTime } from "../lib/format";

/** One trouble. */
export function TroubleNotice({ trouble, after, heardAt = null, onRetry }: { trouble: Trouble; after?: string; heardAt?: number | null; onRetry?: () => void }) {
  return (
    <div class={trouble.lasting ? "notice bad" : "notice"} role="alert">
      <div class="grow">
        <strong>{trouble.title}.</strong> {trouble.todo} {heardAt !== null && <>The page shows the state of {clockTime(heardAt)}. </>}
        {says(trouble) && <span class="said">{trouble.said}</span>}
      </div>
      {after && <span class="muted num">{after}</span>}
      {onRetry && (
        <button type="button" class="button" onClick={onRetry}>
          Try now
        </button>
      )}
    </div>
  );
}

/** Whether a service said more than the title does. */
function says({ title, said }: Trouble): boolean {
  return said !== "" && said.replace(/\.$/, "") !== title;
}

/** The first answer of a stream usually takes less; beyond it an empty page says so. */
const PATIENCE_MS = 5000;

/** How a followed stream is, while it is broken or keeps one waiting. */
export function FollowingNotice({ following }: { following: Following | null }) {
  return following && <Broken health={following.health} retry={following.retry} />;
}

function Broken({ health, retry }: { health: ReadonlySignal<Health>; retry: () => void }) {
  const now = health.value;
  const [, tick] = useState(0);
  const [isLate, late] = useState(false);
  const broken = now.kind === "broken";
  const connecting = now.kind === "connecting";
  useEffect(() => {
    if (!connecting) return;
    const timer = setTimeout(() => late(true), PATIENCE_MS);
    return () => {
      clearTimeout(timer);
      late(false);
    };
  }, [connecting]);
  useEffect(() => {
    if (!broken) return;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [broken]);
  if (connecting && isLate)
    return (
      <div class="notice" role="status">
        <div class="grow">No answer yet: the page keeps trying.</div>
      </div>
    );
  if (now.kind !== "broken") return null;
  const seconds = Math.max(0, Math.ceil((now.retryAt - Date.now()) / 1000));
  return <TroubleNotice trouble={now.trouble} after={seconds ? `again in ${seconds} s` : "trying"} heardAt={now.heardAt} onRetry={retry} />;
}
