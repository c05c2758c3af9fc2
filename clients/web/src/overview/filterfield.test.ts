import { h } from "preact";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";

import { drawn } from "../testing/drawn";

beforeEach(() => {
  vi.stubGlobal("document", Object.assign(new EventTarget(), { baseURI: "http://page.test/", hidden: false }));
  vi.stubGlobal("window", new EventTarget());
  vi.stubGlobal("fetch", () => new Promise(() => undefined)); // nobody answers
  vi.resetModules();
});
afterEach(() => vi.unstubAllGlobals());

const DRIVERS = ["d0", "d1", "d2", "d3", "d4", "d5"];

describe("the driver that a filter names", () => {
  test("is followed alone while a page with the filter is shown, and no longer", async () => {
    const [feed, { useNewest }, { location_ }] = [await import("./feed"), await import("./filterfield"), await import("../lib/router")];
    feed.drivers.value = DRIVERS;
    location_.value = "/?q=driver:d5";
    const Filtered = () => (useNewest(), null);
    const page = await drawn(h(Filtered, {}));
    expect(feed.followed.value).toEqual(["d5"]);
    await page.leave();
    expect(feed.followed.value).toEqual(DRIVERS.slice(0, feed.MOST_DRIVERS));
  });

  test("is the only one that is asked when such a page comes, comes back, or follows another", async () => {
    const [feed, { useNewest }, { location_ }] = [await import("./feed"), await import("./filterfield"), await import("../lib/router")];
    feed.drivers.value = DRIVERS;
    location_.value = "/?q=driver:d5";
    const asked = new Set<string>();
    feed.newest.followings.subscribe((all) => all.forEach(({ driver }) => asked.add(driver)));
    const [One, Other] = [() => (useNewest(), null), () => (useNewest(), null)];
    const page = await drawn(h(One, {}));
    await page.show(h(Other, {}));
    await page.leave();
    await page.show(h(One, {}));
    expect([...asked]).toEqual(["d5"]);
    await page.leave();
  });
});

describe("drivers that are not followed", () => {
  test.each([
    ["../run/all", {}],
    ["../run/one", { params: { id: "run-1" } }],
  ])("are named on %s", async (where, given) => {
    const feed = await import("./feed");
    const { default: Page } = await import(where);
    feed.drivers.value = DRIVERS;
    const page = await drawn(h(Page, { query: new URLSearchParams(), ...given }));
    const [notice] = page.root.ofClass("notice");
    expect(notice?.text).toContain("Not shown: d4 d5");
    feed.drivers.value = DRIVERS.slice(0, 2);
    await page.show(h(Page, { query: new URLSearchParams(), ...given }));
    expect(page.root.ofClass("notice")).toEqual([]);
    await page.leave();
  });
});
