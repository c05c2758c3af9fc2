import { expect, test } from "vitest";

import { parseTokenFragment } from "./session";

test("a token is taken from the fragment, with the place to go on to", () => {
  expect(parseTokenFragment("#token=abc")).toEqual({ token: "abc", route: "/" });
  expect(parseTokenFragment("#token=a%2Bb&go=%2Frollouts%2Fx")).toEqual({ token: "a+b", route: "/rollouts/x" });
});

test("an ordinary place is none", () => {
  expect(parseTokenFragment("#/rollouts/x")).toBeNull();
  expect(parseTokenFragment("")).toBeNull();
});
