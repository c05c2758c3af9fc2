// The stream of rows, for as long as somebody shows it: one for the whole page, however many parts look at it.
import { computed, signal } from "@preact/signals";
import { create } from "@bufbuild/protobuf";
import { RolloutService, WatchRolloutsRequestSchema } from "@gen/penstock/driver/v1/rollout_service_pb";

import { follow, type Following } from "../lib/follow";
import { seesAll } from "../lib/scope";
import { client } from "../lib/transport";
import { Board, type Row } from "./board";

/** Of those that have ended, this many are shown. */
export const ENDED_SHOWN = 2000;

const board = new Board(ENDED_SHOWN);
const version = signal(0);

/** All rows, newest first. */
export const rows = computed<readonly Row[]>(() => {
  version.value;
  return board.list();
});

/** Whether what there was at the beginning has come. */
export const complete = computed(() => {
  version.value;
  return board.complete;
});

export const following = signal<Following | null>(null);
let users = 0;
/** Rows outlive the stream that told them, while another page is shown. */
let heardAt: number | null = null;

/** Begins to follow, and gives what ends it. */
export function watch(): () => void {
  users += 1;
  following.value ??= start();
  return () => {
    users -= 1;
    if (users) return;
    following.value?.stop();
    following.value = null;
  };
}

function start(): Following {
  const driver = client(RolloutService);
  return follow(
    "watch the rollouts",
    async function* (signal) {
      const allNamespaces = await seesAll("driver", signal);
      const request = create(WatchRolloutsRequestSchema, { endedLimit: ENDED_SHOWN, filter: { allNamespaces } });
      board.begin();
      yield* driver.watchRollouts(request, { signal, timeoutMs: 0 });
    },
    (message) => {
      heardAt = Date.now();
      if (board.apply(message)) version.value += 1;
    },
    true,
    heardAt,
  );
}
