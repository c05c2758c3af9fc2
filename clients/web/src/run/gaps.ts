// How far trainers' logprobs are from the engine's, by policy version: what they reported to the inference service.
import { signal, type ReadonlySignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { InferenceService, type LogprobGap } from "@gen/penstock/inference/v1/inference_service_pb";

import { isCancelled } from "../lib/errors";
import { client } from "../lib/transport";
import type { LinePoint } from "./model";

const TIMEOUT_MS = 10_000;
const gaps = signal<readonly LogprobGap[]>([]);

/** The points of those versions, oldest first: the mean of |d| in nats. They have no interval. */
export function gapPoints(found: readonly Pick<LogprobGap, "policyVersion" | "tokens" | "meanAbs">[], versions: readonly [number, number] | null): LinePoint[] {
  if (!versions) return [];
  return found
    .map(({ policyVersion, tokens, meanAbs }) => ({ x: Number(policyVersion), mean: { value: meanAbs, low: meanAbs, high: meanAbs, count: Number(tokens) }, own: meanAbs, rows: [] }))
    .filter(({ x }) => versions[0] <= x && x <= versions[1])
    .sort((a, b) => a.x - b.x);
}

/** What was reported; read again when there is a newer version. Empty while no inference service answers. */
export function useGaps(newest: number | null): ReadonlySignal<readonly LogprobGap[]> {
  useEffect(() => {
    if (newest === null) return;
    const abort = new AbortController();
    void read(abort.signal);
    return () => abort.abort();
  }, [newest]);
  return gaps;
}

async function read(signal: AbortSignal): Promise<void> {
  const first = new AbortController();
  try {
    for await (const message of client(InferenceService).watchStats({}, { signal: AbortSignal.any([signal, first.signal]), timeoutMs: TIMEOUT_MS })) {
      gaps.value = message.gaps;
      break;
    }
  } catch (error) {
    if (!isCancelled(error)) gaps.value = []; // without a service, or an old one: there is no such curve
  } finally {
    first.abort(); // one message is all that is wanted of the stream
  }
}
