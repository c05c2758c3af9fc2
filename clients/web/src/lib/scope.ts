// Which namespaces are shown: those of an operator are all of them, anybody else's is the one of the token.
import { Code, ConnectError } from "@connectrpc/connect";

import { serverInfo } from "./members";
import type { Kind } from "./transport";

/** Whether the token may see all namespaces at a service. A service without namespaces shows everything anyway. */
export async function seesAll(service: Kind): Promise<boolean> {
  try {
    const caller = await serverInfo(service);
    return caller.role === "operator" && caller.namespace === "";
  } catch (error) {
    if (ConnectError.from(error).code === Code.Unimplemented) return false;
    throw error;
  }
}
