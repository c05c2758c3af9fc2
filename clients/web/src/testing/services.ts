// Services without a network, for tests.
import type { ConnectRouter } from "@connectrpc/connect";
import { createFetchHandler } from "@connectrpc/connect/protocol";
import { vi } from "vitest";

/** Answers the page's requests by a router's services, until `vi.unstubAllGlobals`. Nothing else is found. */
export function answeredBy(router: ConnectRouter): void {
  const handlers = new Map(router.handlers.map((handler) => [`/rpc${handler.requestPath}`, createFetchHandler(handler)]));
  vi.stubGlobal("document", Object.assign(new EventTarget(), { baseURI: "http://page.test/", hidden: false }));
  vi.stubGlobal("window", new EventTarget());
  vi.stubGlobal("fetch", async (url: string, init: RequestInit) => {
    const handler = handlers.get(new URL(url).pathname);
    return handler ? handler(new Request(url, { ...init, duplex: "half" } as RequestInit)) : new Response(null, { status: 404 });
  });
}
