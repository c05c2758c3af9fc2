import { Code, ConnectError } from "@connectrpc/connect";
import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { follow, type Following, once, SILENCE_MS } from "./follow";

let following: Following | null = null;

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("window", new EventTarget());
  vi.stubGlobal("document", new EventTarget());
});

afterEach(() => {
  following?.stop();
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

/** Says something at each of these times, and then nothing until it is given up. */
async function* saying(signal: AbortSignal, ...after: number[]): AsyncGenerator<number> {
  for (const ms of after) {
    await new Promise((resolve) => setTimeout(resolve, ms));
    yield ms;
  }
  await new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}

test("a stream that falls silent is broken, is told, and is opened again", async () => {
  let opened = 0;
  following = follow("watch", (signal) => saying(signal, ...(opened++ ? [] : [0, SILENCE_MS - 1])), () => {});
  await vi.advanceTimersByTimeAsync(2 * SILENCE_MS - 2);
  expect(following.health.peek().kind).toBe("live");
  await vi.advanceTimersByTimeAsync(1);
  // What stands on the page is of when something came last.
  const heardAt = Date.now() - SILENCE_MS;
  expect(following.health.peek()).toMatchObject({ kind: "broken", heardAt, trouble: { said: "Nothing came for 30 s.", lasting: false } });
  expect(opened).toBe(1);
  await vi.advanceTimersByTimeAsync(400);
  expect(opened).toBe(2);
});

test("one that ends with what it follows is no exception, and a message counts as a sign of life", async () => {
  following = follow("follow this rollout", (signal) => saying(signal, 0, SILENCE_MS - 1, SILENCE_MS - 1), () => {}, false);
  await vi.advanceTimersByTimeAsync(3 * SILENCE_MS - 3);
  expect(following.health.peek().kind).toBe("live");
  await vi.advanceTimersByTimeAsync(1);
  expect(following.health.peek().kind).toBe("broken");
});

test("one answer is asked for until it comes, and then no more", async () => {
  const answers: string[] = [];
  let asked = 0;
  const ask = () => (asked++ ? Promise.resolve("the list") : Promise.reject(new ConnectError("starting", Code.Unavailable)));
  following = follow("list the agents", () => once(ask()), (answer) => answers.push(answer), false);
  await vi.advanceTimersByTimeAsync(0);
  expect(following.health.peek()).toMatchObject({ kind: "broken", trouble: { said: "starting" } });
  await vi.advanceTimersByTimeAsync(60_000);
  expect(following.health.peek().kind).toBe("ended");
  expect([answers, asked]).toEqual([["the list"], 2]);
});
