// Which namespaces are shown: those of an operator are all of them, anybody else's is the one of the token.
import { Code, ConnectError } from "@connectrpc/connect";
import { OperationsService } from "@gen/penstock/ops/v1/operations_service_pb";

import { client } from "./transport";

/** Whether the token may see all namespaces at a service. A service without namespaces shows everything anyway. */
export async function seesAll(service: string, signal: AbortSignal): Promise<boolean> {
  try {
    const caller = await client(OperationsService).getServerInfo({}, { signal, headers: { "penstock-service": service } });
    return caller.role === "operator" && caller.namespace === "";
  } catch (error) {
    if (ConnectError.from(error).code === Code.Unimplemented) return false;
    throw error;
  }
}
