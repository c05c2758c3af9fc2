// Calls to the services: gRPC-Web to this page's own origin, whose gateway passes them on byte for byte.
import type { DescService } from "@bufbuild/protobuf";
import { type Client, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";

import { token } from "./session";

const authorise: Interceptor = (next) => (request) => {
  if (token.peek()) request.header.set("authorization", `Bearer ${token.peek()}`);
  return next(request);
};

const transport = createGrpcWebTransport({
  baseUrl: new URL("rpc", document.baseURI).href,
  interceptors: [authorise],
  defaultTimeoutMs: 30_000,
});

/** For cancelling: agents and sandboxes are gone when the driver answers. */
export const CANCEL_MS = 120_000;

/** A client of one of the services. Streams want `{timeoutMs: 0}`: without it they end after 30 s. */
export function client<S extends DescService>(service: S): Client<S> {
  return createClient(service, transport);
}
