// What the services report as wrong: the same list as `penstock doctor --live`, asked for every few seconds.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Code } from "@connectrpc/connect";
import { OperationsService, type Trouble } from "@gen/penstock/ops/v1/operations_service_pb";

import { explain } from "../lib/errors";
import { client } from "../lib/transport";

const SERVICES = ["inference", "interception", "sandbox", "driver"] as const;
const EVERY_MS = 5000;

interface Found {
  readonly service: string;
  readonly message: string;
  readonly advice: string;
  readonly reason: string;
  readonly grave: boolean;
}

export function Troubles() {
  const found = useSignal<readonly Found[]>([]);
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async () => {
      if (!document.hidden) {
        const each = await Promise.all(SERVICES.map((service) => askOne(service, abort.signal)));
        found.value = each.flat().sort((one, other) => Number(other.grave) - Number(one.grave));
      }
      if (!abort.signal.aborted) timer = setTimeout(() => void ask(), EVERY_MS);
    };
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, []);
  if (!found.value.length) return null;
  return (
    <section class="card part" aria-labelledby="troubles-title">
      <h2 id="troubles-title">Problems</h2>
      {found.value.map((one) => (
        <p key={`${one.service} ${one.reason}`} class={one.grave ? "notice bad" : "notice"} role="status">
          <span class="grow">
            <strong>{one.service}</strong>: <bdi>{one.message}</bdi> <span class="muted">({one.reason})</span>
            <br />
            <bdi>{one.advice}</bdi>
          </span>
        </p>
      ))}
    </section>
  );
}

async function askOne(service: string, signal: AbortSignal): Promise<readonly Found[]> {
  try {
    const status = await client(OperationsService).getStatus({}, { signal, headers: { "penstock-service": service } });
    return status.troubles.map(({ message, advice, reason, grave }: Trouble) => ({ service, message, advice, reason, grave }));
  } catch (error) {
    const { reason, code, title, todo } = explain(error, `ask the ${service} service for its status`);
    // A trainer may have an engine of its own; a page that is left asks nothing; what a role may not ask is no problem.
    if (signal.aborted || reason === "SERVICE_ABSENT" || code === Code.PermissionDenied || code === Code.Unauthenticated) return [];
    return [{ service, message: title, advice: todo, reason: reason || Code[code] || "UNKNOWN", grave: true }];
  }
}
