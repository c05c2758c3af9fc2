/** Calls that another service of the kind must answer: HOME_ELSEWHERE is followed, once. */

import { ConnectError, type ContextKey, type Transport } from "@connectrpc/connect";
import { type Endpoints, isLocal } from "./endpoints.js";
import { ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";

/** Targets of another form are not followed. */
const HOST_AND_PORT = /^(?!unix:)(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):\d{1,5}$/;

/**
 * The address that HOME_ELSEWHERE names; absent where the error is another one, or the token must not go there.
 *
 * @param from the address that answered so.
 */
export function homeOf(error: unknown, from: string, endpoints: Endpoints): string | undefined {
  if (!(error instanceof ConnectError)) {
    return undefined;
  }
  const [info] = error.findDetails(ErrorInfoSchema);
  const address = info?.reason === "HOME_ELSEWHERE" ? (info.metadata["address"] ?? "") : "";
  return mayReceiveToken(from, address, endpoints) ? address : undefined;
}

/**
 * Whether a service may say that the token is for another address too. It goes to this machine, if it was for this machine, or to
 * a server that the caller's own CA has certified.
 *
 * @param from the address of the service that says so.
 */
export function mayReceiveToken(from: string, address: string, { tls }: Endpoints): boolean {
  const mayGo = tls === undefined ? isLocal(from) && isLocal(address) : tls.caFile !== undefined;
  return mayGo && HOST_AND_PORT.test(address) && URL.canParse(`http://${address}`);
}

/**
 * A transport whose calls with one request are repeated where their home is.
 *
 * @param own answers first.
 * @param home the transport of the service that an error names; absent = the error stands.
 * @param chosen where the caller of a stream of requests has it sent.
 */
export function following(
  own: Transport,
  home: (error: unknown) => Transport | undefined,
  chosen: ContextKey<Transport | undefined>,
): Transport {
  function elsewhere(error: unknown): Transport {
    const there = home(error);
    if (there === undefined) {
      throw error;
    }
    return there;
  }
  return {
    async unary(...call) {
      try {
        return await own.unary(...call);
      } catch (error) {
        return elsewhere(error).unary(...call);
      }
    },
    async stream(method, signal, timeoutMs, header, input, contextValues) {
      if (method.methodKind !== "server_streaming") {
        return (contextValues?.get(chosen) ?? own).stream(method, signal, timeoutMs, header, input, contextValues);
      }
      const requests = await Array.fromAsync(input);
      async function* again() {
        yield* requests;
      }
      const begin = (at: Transport) => at.stream(method, signal, timeoutMs, header, again(), contextValues);
      try {
        const response = await begin(own);
        return { ...response, message: orElse(response.message, async (error) => (await begin(elsewhere(error))).message) };
      } catch (error) {
        return begin(elsewhere(error));
      }
    },
  };
}

/** The messages, or those of another stream where there is an error before the first. */
function orElse<A>(messages: AsyncIterable<A>, other: (error: unknown) => Promise<AsyncIterable<A>>): AsyncIterable<A> {
  let source = messages[Symbol.asyncIterator]();
  let isFirst = true;
  const next = async () => {
    if (!isFirst) {
      return source.next();
    }
    isFirst = false;
    try {
      return await source.next();
    } catch (error) {
      source = (await other(error))[Symbol.asyncIterator]();
      return source.next();
    }
  };
  return { [Symbol.asyncIterator]: () => ({ next }) };
}
