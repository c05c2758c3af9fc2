import fc from "fast-check";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";

import { deleteView, MOST_VIEWS, parseViews, refusal, saveView, startViews, views } from "./views";

let kept: Map<string, string>;

beforeEach(() => {
  kept = new Map();
  vi.stubGlobal("window", new EventTarget());
  vi.stubGlobal("localStorage", { getItem: (key: string) => kept.get(key) ?? null, setItem: (key: string, value: string) => kept.set(key, value) });
  views.value = [];
});
afterEach(() => vi.unstubAllGlobals());

describe("saved views", () => {
  test("outlive the page, and one of the same name replaces the other", () => {
    expect([saveView("failures", "/?q=state%3Afailed"), saveView("best", "/?sort=-reward"), saveView(" failures ", "/tasks")]).toEqual(["", "", ""]);
    views.value = [];
    startViews();
    expect(views.peek()).toEqual([
      { name: "best", place: "/?sort=-reward" },
      { name: "failures", place: "/tasks" },
    ]);
    deleteView("best");
    expect(parseViews(kept.get("penstock.views") ?? null)).toEqual([{ name: "failures", place: "/tasks" }]);
  });

  test("are refused by field, and are bounded in number", () => {
    const full = Array.from({ length: MOST_VIEWS }, (_, index) => ({ name: String(index), place: "/" }));
    expect(refusal(" ", "/", [])).toMatch(/^Name: /);
    expect(refusal("x".repeat(61), "/", [])).toBe("Name: 61 characters, at most 60.");
    expect(refusal("x", `/?q=${"x".repeat(2000)}`, [])).toMatch(/too long/);
    expect(refusal("x", "/", full)).toMatch(/There are 50 views/);
    expect(refusal("7", "/tasks", full)).toBe("");
  });

  test("that a browser cannot keep are not there", () => {
    vi.stubGlobal("localStorage", { setItem: () => { throw new DOMException("full", "QuotaExceededError"); } });
    expect(saveView("x", "/")).toMatch(/keeps nothing/);
    expect(views.peek()).toEqual([]);
  });

  test("lead nowhere but to this page, whatever is kept", () => {
    expect(parseViews('[{"name":"a","place":"//evil.example"},{"name":"b","place":"javascript:x"},{"name":"","place":"/"},{"name":"c","place":"/","more":1},7,null]')).toEqual([{ name: "c", place: "/" }]);
    expect(parseViews("{")).toEqual([]);
    fc.assert(fc.property(fc.json(), (text) => parseViews(text).every(({ name, place }) => name.length <= 60 && place.startsWith("/"))));
  });
});
