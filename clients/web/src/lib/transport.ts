// Calls to the services: gRPC-Web to this page's own origin, whose gateway passes them on byte for byte.
import type { DescService } from "@bufbuild/protobuf";
import { type Client, createClient, type Interceptor, type Transport } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";

import { token } from "./session";

const authorise: Interceptor = (next) => (request) => {
  if (token.peek()) request.header.set("authorization", `Bearer ${token.peek()}`);
  return next(request);
};

/** The four kinds of services. */
export type Kind = "driver" | "inference" | "interception" | "sandbox";

const transports = new Map<string, Transport>();

function transport(member: string): Transport {
  let found = transports.get(member);
  if (!found) {
    const addressed: Interceptor = (next) => (request) => {
      if (member) request.header.set("penstock-member", member);
      return next(request);
    };
    found = createGrpcWebTransport({
      baseUrl: new URL("rpc", document.baseURI).href,
      interceptors: [authorise, addressed],
      defaultTimeoutMs: 30_000,
    });
    transports.set(member, found);
  }
  return found;
}

/** For cancelling: agents and sandboxes are gone when the driver answers. */
export const CANCEL_MS = 120_000;

/**
 * A client of one of the services. Streams want `{timeoutMs: 0}`: without it they end after 30 s.
 *
 * @param member the name of one of several services of the kind; empty = that of the connection.
 */
export function client<S extends DescService>(service: S, member = ""): Client<S> {
  return createClient(service, transport(member));
}
