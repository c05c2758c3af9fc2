// Which services there are, how they are and what runs there; above it what they report as wrong, as `penstock doctor --live` does.
import { type Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { durationMs, timestampMs } from "@bufbuild/protobuf/wkt";

import { bytes, duration, plain } from "../lib/format";
import type { Kind } from "../lib/transport";
import { KIND_NAMES, load, readFleet, type FleetRow, type State } from "./fleet";

const EVERY_MS = 5000;

/** All services, asked every few seconds while the page is seen; empty until the first answer. */
export function useFleet(): Signal<readonly FleetRow[]> {
  const fleet = useSignal<readonly FleetRow[]>([]);
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async () => {
      if (!document.hidden) {
        const read = await readFleet(abort.signal);
        if (!abort.signal.aborted) fleet.value = read;
      }
      if (!abort.signal.aborted) timer = setTimeout(() => void ask(), EVERY_MS);
    };
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, []);
  return fleet;
}

export function Problems({ fleet }: { fleet: readonly FleetRow[] }) {
  const found = fleet.flatMap((row) => row.problems).sort((one, other) => Number(other.grave) - Number(one.grave));
  if (!found.length) return null;
  return (
    <section class="card part" aria-labelledby="troubles-title">
      <h2 id="troubles-title">Problems</h2>
      {found.map((one) => (
        <p key={`${one.service} ${one.reason}`} class={one.grave ? "notice bad" : "notice"} role="status">
          <span class="grow">
            <strong>{one.service}</strong>: <bdi>{one.message}</bdi> <span class="muted">({one.reason})</span>
            <br />
            <bdi>{one.advice}</bdi>
          </span>
        </p>
      ))}
    </section>
  );
}

const TONES: Readonly<Record<State, string>> = { up: "good", draining: "warn", lost: "bad" };

export function FleetTable({ fleet }: { fleet: readonly FleetRow[] }) {
  if (!fleet.length) return null;
  const count = (state: State): number => fleet.filter((row) => row.state === state).length;
  const words = (["up", "draining", "lost"] as const).flatMap((state) => (count(state) ? [`${plain(count(state))} ${state}`] : []));
  return (
    <section class="card part" aria-labelledby="fleet-title">
      <h2 id="fleet-title">All services</h2>
      <p class="muted">{words.join(", ")}</p>
      <div class="scroll">
        <table>
          <caption class="visually-hidden">All services and what runs there</caption>
          <thead>
            <tr>
              <th scope="col">Service</th>
              <th scope="col">Name</th>
              <th scope="col">Address</th>
              <th scope="col">State</th>
              <th scope="col">Load</th>
              <th scope="col" class="right">Event loop</th>
              <th scope="col" class="right">Memory</th>
              <th scope="col" class="right">Up for</th>
              <th scope="col">Version</th>
            </tr>
          </thead>
          <tbody>
            {fleet.map((row) => (
              <Line key={`${row.kind} ${row.name} ${row.address}`} row={row} />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Line({ row }: { row: FleetRow }) {
  const { kind, name, address, state, status } = row;
  const up = status?.startTime && status.serverTime ? timestampMs(status.serverTime) - timestampMs(status.startTime) : null;
  const none = <span class="muted">–</span>;
  return (
    <tr>
      <td>{KIND_NAMES[kind]}</td>
      <td>{name ? <bdi>{name}</bdi> : none}</td>
      <td class="mono">{address ? <bdi>{address}</bdi> : none}</td>
      <td>
        <span class={`chip ${TONES[state]}`}>{state}</span>
      </td>
      <td class="num">{load(row) || none}</td>
      <td class="right num">{status?.loopLag ? `${Math.round(durationMs(status.loopLag))} ms late` : none}</td>
      <td class="right num">{status?.residentBytes ? bytes(Number(status.residentBytes)) : none}</td>
      <td class="right num">{up === null ? none : duration(up)}</td>
      <td>{status?.version || none}</td>
    </tr>
  );
}

/** Chooses which of several services of a kind a part of the page shows. Nothing where there is one. */
export function Choice({ kind, fleet, chosen }: { kind: Kind; fleet: readonly FleetRow[]; chosen: Signal<string> }) {
  const names = fleet.filter((row) => row.kind === kind && row.name && row.state !== "lost").map(({ name }) => name);
  if (names.length < 2) return null;
  return (
    <label class="choice">
      <span class="visually-hidden">Which {KIND_NAMES[kind]}</span>
      <select class="field" value={chosen.value} onChange={(event) => (chosen.value = event.currentTarget.value)}>
        <option value="">that of the connection</option>
        {names.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}
