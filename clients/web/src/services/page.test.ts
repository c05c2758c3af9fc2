import { create } from "@bufbuild/protobuf";
import { createConnectRouter } from "@connectrpc/connect";
import { SandboxService, type WatchSandboxesRequest, WatchSandboxesResponseSchema } from "@gen/penstock/sandbox/v1/sandbox_service_pb";
import { h } from "preact";
import { afterEach, describe, expect, test, vi } from "vitest";

import { drawn } from "../testing/drawn";
import { answeredBy } from "../testing/services";
import Services, { SandboxUsage } from "./page";

afterEach(() => vi.unstubAllGlobals());

const told = (shown: number, count: number) =>
  create(WatchSandboxesResponseSchema, { count, sandboxes: Array.from({ length: shown }, (_, index) => ({ sandbox: { sandboxId: `s${index}` }, stats: { memoryBytes: 1024n * 1024n, pids: 2 } })) });

describe("what the sandboxes use", () => {
  test("requests as many as a service returns", async () => {
    let tell = (_: WatchSandboxesRequest): void => {};
    const asked = new Promise<WatchSandboxesRequest>((resolve) => (tell = resolve));
    const router = createConnectRouter().service(SandboxService, {
      async *watchSandboxes(request, { signal }) {
        tell(request);
        yield told(0, 0);
        await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
      },
    });
    answeredBy(router);
    const page = await drawn(h(Services, {}));
    expect((await asked).most).toBe(1000);
    await page.leave();
  });

  test.each<[number, number, string[]]>([
    [300, 300, ["Sandboxes300", "Memory300 MiBof those that report it", "Processes600"]],
    [1000, 1500, ["Sandboxes1,500", "Memory1000 MiBof those of the newest 1,000 that report it", "Processes2,000of the newest 1,000"]],
  ])("is of %d sandboxes of %d, and says so where they are not all", async (shown, count, words) => {
    const page = await drawn(h(SandboxUsage, { told: told(shown, count) }));
    expect(page.root.ofClass("measure").map((measure) => measure.text)).toEqual(words);
    expect(page.root.ofClass("mono").length).toBe(200);
    expect(page.root.text.endsWith(`and ${(count - 200).toLocaleString("en")} more, older ones`)).toBe(true);
    await page.leave();
  });
});
