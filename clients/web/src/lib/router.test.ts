import { describe, expect, test } from "vitest";

import { href, match, type Route } from "./router";

const routes: Route[] = ["/", "/rollouts/:id"].map((pattern) => ({
  pattern,
  title: () => pattern,
  load: () => Promise.reject(new Error("not loaded here")),
}));

describe("routes", () => {
  test("an id is found and decoded", () => {
    const found = match(routes, "/rollouts/a%2Fb%20c?call=3");
    expect(found?.params).toEqual({ id: "a/b c" });
    expect(found?.query.get("call")).toBe("3");
  });

  test("the empty place is the first page", () => {
    expect(match(routes, "/")?.route.pattern).toBe("/");
  });

  test("what nobody has is nowhere", () => {
    expect(match(routes, "/rollouts")).toBeNull();
    expect(match(routes, "/rollouts/a/b")).toBeNull();
    expect(match(routes, "/rollouts/%")).toBeNull();
  });

  test("an address is found again whatever the id is", () => {
    const id = "../?#&%é";
    expect(match(routes, href("/rollouts", id).slice(1))?.params).toEqual({ id });
  });
});
