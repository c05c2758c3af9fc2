import { Code, ConnectError, createConnectRouter, type ServiceImpl } from "@connectrpc/connect";
import { effect, type ReadonlySignal } from "@preact/signals";
import { afterEach, describe, expect, test, vi } from "vitest";
import { Phase, type RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import { RolloutGateService } from "@gen/penstock/interception/v1/rollout_gate_service_pb";
import type { followRollout as FollowRollout } from "./model";

import { answeredBy } from "../testing/services";

/** The page's own calls, answered by services in this process; what of a browser they need is there. */
async function served(driver: Partial<ServiceImpl<typeof RolloutService>>, gate: Partial<ServiceImpl<typeof RolloutGateService>>): Promise<{ followRollout: typeof FollowRollout; kept: typeof import("./model").kept }> {
  const router = createConnectRouter().service(RolloutService, driver).service(RolloutGateService, gate);
  answeredBy(router);
  return import("./model");
}

/** The first value that is as wanted. */
function until<T>(of: ReadonlySignal<T>, isWanted: (value: T) => boolean): Promise<T> {
  return new Promise((resolve) => {
    const stop = effect(() => {
      if (isWanted(of.value)) queueMicrotask(() => (stop(), resolve(of.peek())));
    });
  });
}

function gateway(): { opened: Promise<void>; open: () => void } {
  let open = (): void => {};
  const opened = new Promise<void>((resolve) => (open = resolve));
  return { opened, open };
}

const over = (signal: AbortSignal): Promise<void> =>
  new Promise((_, reject) => signal.addEventListener("abort", () => reject(new ConnectError("over", Code.Canceled)), { once: true }));

const ended = { callId: "", index: 0, endTime: { seconds: 1n, nanos: 0 } };

afterEach(() => vi.unstubAllGlobals());

describe("a rollout that is followed", () => {
  test("what was read of an attempt that failed meanwhile is not shown as the next one's", async () => {
    const [asked, failed, answered, reopened] = [gateway(), gateway(), gateway(), gateway()];
    let current = "old";
    const { followRollout } = await served(
      {
        getRollout: () => ({ rollout: { rolloutId: "r", phase: Phase.RUNNING } }),
        async *watchRollout(_, { signal }) {
          await failed.opened;
          yield { message: { case: "event", value: { sequence: 1n, event: { case: "attemptFailed", value: { attempt: 1 } } } } };
          await reopened.opened;
          yield { message: { case: "event", value: { sequence: 2n, event: { case: "phaseChanged", value: { phase: Phase.CONFIGURING } } } } };
          await over(signal);
        },
      },
      {
        async *getCapture() {
          asked.open();
          await answered.opened;
          yield { trajectory: { calls: [{ ...ended, callId: current }] } };
        },
        async *watchCalls(_, { signal }) {
          await over(signal);
        },
      },
    );
    const model = followRollout("r");
    await asked.opened;
    failed.open();
    await until(model.events, (events) => events.length === 1);
    answered.open();
    await until(model.isCaptureRead, (isRead) => isRead);
    expect(model.capture.value.calls).toEqual([]); // though the gate still has them
    current = "new";
    reopened.open();
    const capture = await until(model.capture, ({ calls }) => calls.length > 0);
    expect(capture.calls.map((call) => call.callId)).toEqual(["new"]);
    model.stop();
  });

  test("each host tool call is shown as it stands, and asked for until it has ended", async () => {
    const at = { seconds: 1n, nanos: 0 };
    const tool = (index: number, isOpen: boolean) => ({ toolCallId: `t${index}`, index, name: "lookup", ...(isOpen ? {} : { endTime: at }) });
    // What the gate has at each reading: the second call ends before the first.
    const states = [[], [tool(0, true)], [tool(0, true), tool(1, false)], [tool(0, false), tool(1, false)], [tool(0, false), tool(1, false), tool(2, false)]];
    const asked: (number | undefined)[] = [];
    const { followRollout } = await served(
      {
        getRollout: () => ({ rollout: { rolloutId: "r", phase: Phase.RUNNING } }),
        async *watchRollout(_, { signal }) {
          await over(signal);
        },
      },
      {
        async *getCapture({ afterIndex, afterToolCallIndex }) {
          const index = afterIndex === undefined ? 0 : afterIndex + 1;
          const state = states[asked.length] ?? [];
          asked.push(afterToolCallIndex);
          yield { trajectory: { calls: [{ ...ended, callId: `c${index}`, index }] } };
          for (const call of state) if (call.index > (afterToolCallIndex ?? -1)) yield { trajectory: { hostToolCalls: [call] } };
        },
        async *watchCalls(_, { signal }) {
          await over(signal);
        },
      },
    );
    const model = followRollout("r");
    for (let count = 1; count <= states.length; count += 1) {
      const capture = await until(model.capture, ({ calls }) => calls.length === count);
      expect(capture.hostToolCalls.map((call) => [call.index, call.endTime === undefined])).toEqual(
        (states[count - 1] ?? []).map((call) => [call.index, !("endTime" in call)]),
      );
      model.retryCapture();
    }
    expect(asked.slice(0, states.length)).toEqual([-1, -1, -1, -1, 1]);
    model.stop();
  });

  test.each(["paused", "resumed"] as const)("how it stands is read again once it is %s", async (name) => {
    const isPaused = name === "paused";
    const [changed, known] = [gateway(), gateway()];
    let asked = 0;
    const { followRollout } = await served(
      {
        getRollout: () => {
          asked += 1;
          return { rollout: { rolloutId: "r", phase: Phase.RUNNING, paused: asked > 1 ? isPaused : !isPaused } };
        },
        async *watchRollout(_, { signal }) {
          known.open();
          await changed.opened;
          yield { message: { case: "event", value: { sequence: 1n, event: { case: name, value: {} } } } };
          await over(signal);
        },
      },
      {
        async *getCapture() {},
        async *watchCalls(_, { signal }) {
          await over(signal);
        },
      },
    );
    const model = followRollout("r");
    await known.opened;
    expect(model.rollout.value?.paused).toBe(!isPaused);
    changed.open();
    expect((await until(model.rollout, (rollout) => rollout?.paused === isPaused))?.paused).toBe(isPaused);
    model.stop();
  });

  test("events that are not kept are counted once each, and those of the timeline are kept", async () => {
    const { kept } = await served({}, {});
    const event = (sequence: number, name: "phaseChanged" | "callFinished"): RolloutEvent => ({ sequence: BigInt(sequence), event: { case: name } }) as unknown as RolloutEvent;
    let events: readonly RolloutEvent[] = [event(1, "phaseChanged"), event(2, "phaseChanged")];
    let dropped = 0;
    for (let sequence = 3; sequence <= 10; sequence += 1) {
      const next = kept([...events, event(sequence, "callFinished")], 4);
      events = next.events;
      dropped += next.dropped;
    }
    expect(events.map((item) => Number(item.sequence))).toEqual([1, 2, 7, 8, 9, 10]);
    expect(dropped).toBe(4);
  });
});
