// What the inference service serves, and with what.
import type { GetInfoResponse } from "@gen/penstock/inference/v1/inference_service_pb";

/** "Model tiny, served by numpy 1.0"; without what is not reported, empty where nothing is. */
export function servedWords({ model, engine, engineVersion }: Pick<GetInfoResponse, "model" | "engine" | "engineVersion">): string {
  const by = [engine, engineVersion].filter(Boolean).join(" ");
  if (!model) return by && `Served by ${by}`;
  return by ? `Model ${model}, served by ${by}` : `Model ${model}`;
}
