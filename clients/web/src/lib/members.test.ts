import { Code, ConnectError, createConnectRouter } from "@connectrpc/connect";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { OperationsService } from "@gen/penstock/ops/v1/operations_service_pb";

import { answeredBy } from "../testing/services";

let members: typeof import("./members");
let listed: string[] = [];

beforeEach(async () => {
  const router = createConnectRouter().service(OperationsService, {
    getServerInfo: () => ({ members: listed.map((name) => ({ service: "driver", name })) }),
  });
  answeredBy(router);
  vi.resetModules();
  members = await import("./members");
});
afterEach(() => vi.unstubAllGlobals());

/** Asks for something that one driver has. */
function askOf(home: string): { asked: string[]; ask: (driver: string) => Promise<string> } {
  const asked: string[] = [];
  return {
    asked,
    ask: async (driver) => {
      asked.push(driver);
      if (driver !== home) throw new ConnectError(`${driver} has no such rollout`, Code.NotFound);
      return driver;
    },
  };
}

describe("the driver that has a rollout", () => {
  test("is the connection's where it is known there, and no other one is asked", async () => {
    listed = ["d0", "d1"];
    const { asked, ask } = askOf("");
    expect(await members.findAt("x", ask)).toBe("");
    expect(asked).toEqual([""]);
  });

  test("is looked for at all others where the connection's does not know it", async () => {
    listed = ["d0", "d1", "d2"];
    const { asked, ask } = askOf("d2");
    expect(await members.findAt("x", ask)).toBe("d2");
    expect(asked).toEqual(["", "d0", "d1", "d2"]);
  });

  test("is asked first once it is known", async () => {
    listed = ["d0", "d1"];
    members.remember("x", { driver: "d1", gate: "g0" }, "");
    const { asked, ask } = askOf("d1");
    expect(await members.findAt("x", ask)).toBe("d1");
    expect([asked, members.gateOf("x")]).toEqual([["d1"], "g0"]);
  });

  test("is none where nobody knows it: the first one's error is shown", async () => {
    listed = ["d0"];
    const { ask } = askOf("nowhere");
    await expect(members.findAt("x", ask)).rejects.toThrow(" has no such rollout");
  });

  test("keeps its gate when only its group is told", () => {
    members.remember("x", { driver: "d1", gate: "g1" }, "d1");
    members.remember("x", undefined, "d1");
    expect(members.gateOf("x")).toBe("g1");
  });
});

test("without a list there is one driver, that of the connection", async () => {
  listed = [];
  expect(await members.driverNames()).toEqual([""]);
});
