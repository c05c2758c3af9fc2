// All services, and what one of each kind does now: the gate's queue and sessions, the engine, the sandboxes and what they use.
import { type Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { create } from "@bufbuild/protobuf";
import { durationMs, timestampMs } from "@bufbuild/protobuf/wkt";
import { InferenceService, WatchStatsRequestSchema, type WatchStatsResponse } from "@gen/penstock/inference/v1/inference_service_pb";
import {
  type GateSession,
  RolloutGateService,
  WatchGateRequestSchema,
  type WatchGateResponse,
} from "@gen/penstock/interception/v1/rollout_gate_service_pb";
import { SandboxState } from "@gen/penstock/sandbox/v1/sandbox_pb";
import {
  SandboxService,
  WatchSandboxesRequestSchema,
  type WatchSandboxesResponse,
  type WatchSandboxesResponse_Usage,
} from "@gen/penstock/sandbox/v1/sandbox_service_pb";

import { now } from "../lib/clock";
import { bytes, compact, duration, plain, shortId } from "../lib/format";
import { href } from "../lib/router";
import { seesAll } from "../lib/scope";
import { useStream } from "../lib/stream";
import { client } from "../lib/transport";
import { FollowingNotice } from "../ui/notice";
import { Choice, FleetTable, Problems, useFleet } from "./fleettable";
import type { FleetRow } from "./fleet";
import "./services.css";
import { servedWords } from "./served";
import { pushed, rate, Spark } from "./spark";

export default function Services() {
  const fleet = useFleet().value;
  const gate = useSignal("");
  const sandbox = useSignal("");
  return (
    <div class="services">
      <h1 class="visually-hidden">Services</h1>
      <Problems fleet={fleet} />
      <FleetTable fleet={fleet} />
      <Gate key={`gate ${gate.value}`} fleet={fleet} chosen={gate} />
      <Inference />
      <Sandboxes key={`sandboxes ${sandbox.value}`} fleet={fleet} chosen={sandbox} />
    </div>
  );
}

/** A part of the page that shows one of several services; made anew for another one. */
interface Chosen {
  readonly fleet: readonly FleetRow[];
  readonly chosen: Signal<string>;
}

function Gate({ fleet, chosen }: Chosen) {
  const queue = useSignal<readonly number[]>([]);
  const { message, following } = useStream<WatchGateResponse>(
    "watch the gate",
    async function* (signal) {
      const request = create(WatchGateRequestSchema, { allNamespaces: await seesAll("interception") });
      yield* client(RolloutGateService, chosen.peek()).watchGate(request, { signal, timeoutMs: 0 });
    },
    (next) => (queue.value = pushed(queue.value, next.queuedCalls)),
  );
  const gate = message.value;
  const credit = gate?.sessions.reduce((sum, one) => sum + (one.lost ? 0 : one.creditCalls), 0) ?? 0;
  const starving = gate !== null && gate.queuedCalls > 0 && gate.queuedCalls > gate.pausedCalls;
  return (
    <section class="card part" aria-labelledby="gate-title">
      <div class="title">
        <h2 id="gate-title">Gate</h2>
        <Choice kind="interception" fleet={fleet} chosen={chosen} />
      </div>
      <FollowingNotice following={following.value} />
      {gate && (
        <>
          <div class="measures">
            <Measure name="Calls that wait" value={plain(gate.queuedCalls)} tone={starving ? "warn" : ""}>
              <Spark values={queue.value} label={`Calls that wait: ${gate.queuedCalls}`} />
            </Measure>
            <Measure
              name="Longest wait"
              value={gate.oldestWait ? duration(durationMs(gate.oldestWait)) : "–"}
              note={gate.pausedCalls ? `${plain(gate.pausedCalls)} held back by a pause` : ""}
            />
            <Measure name="With trainers" value={plain(gate.leasedCalls)} note={`credit for ${compact(credit)}`} />
            <Measure name="With engines" value={plain(gate.dispatchedCalls)} />
            <Measure name="Open rollouts" value={plain(gate.openRollouts)} />
          </div>
          {starving && credit - gate.leasedCalls <= 0 && (
            <p class="notice" role="status">
              <span>
                <strong>{gate.sessionCount ? "Trainers have no credit left." : "No trainer is connected."}</strong>{" "}
                {gate.sessionCount
                  ? "Calls wait until they answer what they hold, or ask for more."
                  : "Rollouts of gate mode wait until one attaches, or their calls expire."}
              </span>
            </p>
          )}
          <Sessions sessions={gate.sessions} count={gate.sessionCount} />
        </>
      )}
    </section>
  );
}

function Sessions({ sessions, count }: { sessions: readonly GateSession[]; count: number }) {
  if (!sessions.length) return <p class="muted">No trainer's session.</p>;
  return (
    <div class="scroll">
      <table>
        <caption class="visually-hidden">Trainers' sessions</caption>
        <thead>
          <tr>
            <th scope="col">Trainer</th>
            <th scope="col">Wants</th>
            <th scope="col" class="right">Rollouts</th>
            <th scope="col">Credit</th>
            <th scope="col" class="right">Bytes held</th>
            <th scope="col" class="right">Waiting</th>
            <th scope="col" class="right">Version</th>
            <th scope="col">State</th>
          </tr>
        </thead>
        <tbody>
          {sessions.map((one, index) => (
            <tr key={index}>
              <td>
                <bdi>{one.identity || "–"}</bdi>
              </td>
              <td>
                {one.groupId ? (
                  <a class="mono" href={href("/groups", one.groupId)}>
                    {one.groupId}
                  </a>
                ) : (
                  <bdi>{one.runId ? `run ${one.runId}` : "any"}</bdi>
                )}
              </td>
              <td class="right num">{plain(one.rollouts)}</td>
              <td>
                <Bar part={one.heldCalls} whole={one.creditCalls} said={`${plain(one.heldCalls)} of ${plain(one.creditCalls)} held`} />
              </td>
              <td class="right num">{bytes(Number(one.heldBytes))}</td>
              <td class="right num">{plain(one.queuedCalls)}</td>
              <td class="right num">{one.policyVersion === undefined ? "–" : String(one.policyVersion)}</td>
              <td>
                {one.lost ? (
                  <span class="chip bad">lost</span>
                ) : one.paused ? (
                  <span class="chip warn">paused</span>
                ) : (
                  <span class="chip good">attached</span>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {count > sessions.length && <p class="muted">and {plain(count - sessions.length)} more</p>}
    </div>
  );
}

function Inference() {
  const sampled = useSignal<readonly number[]>([]);
  const before = useSignal<readonly [number, number] | null>(null);
  const { message, following } = useStream<WatchStatsResponse>(
    "watch the inference service",
    (signal) => client(InferenceService).watchStats(create(WatchStatsRequestSchema), { signal, timeoutMs: 0 }),
    (next) => {
      const reading = [performance.now(), Number(next.sampledTokens)] as const;
      const speed = rate(before.value, reading);
      before.value = reading;
      if (speed !== null) sampled.value = pushed(sampled.value, speed);
    },
  );
  const served = useServed(message.value?.policyVersion);
  const stats = message.value;
  const speed = sampled.value.at(-1) ?? 0;
  const prompts = Number(stats?.promptTokens ?? 0n);
  return (
    <section class="card part" aria-labelledby="inference-title">
      <h2 id="inference-title">Inference</h2>
      {served && <p class="muted">{served}</p>}
      <FollowingNotice following={following.value} />
      {stats && (
        <>
          <div class="measures">
            <Measure name="Sampled tokens a second" value={compact(Math.round(speed))}>
              <Spark values={sampled.value} label={`Sampled tokens a second: ${Math.round(speed)}`} />
            </Measure>
            <Measure name="Requests" value={plain(stats.running)} note={`${plain(stats.waiting)} wait`} tone={stats.waiting ? "warn" : ""} />
            <Measure name="Policy version" value={String(stats.policyVersion)} />
            <Measure
              name="Prompt tokens"
              value={compact(prompts)}
              note={prompts ? `${Math.round((100 * Number(stats.cachedPromptTokens)) / prompts)} % from the cache` : ""}
            />
            <Measure name="Cache in use" value={`${Math.round(100 * stats.cacheUse)} %`} />
          </div>
          {stats.replicas.length > 0 && (
            <div class="scroll">
              <table>
                <caption class="visually-hidden">Replicas</caption>
                <thead>
                  <tr>
                    <th scope="col">Replica</th>
                    <th scope="col">State</th>
                    <th scope="col" class="right">Running</th>
                    <th scope="col" class="right">Waiting</th>
                    <th scope="col">Cache</th>
                    <th scope="col" class="right">Restarts</th>
                  </tr>
                </thead>
                <tbody>
                  {stats.replicas.map((one) => (
                    <tr key={one.name}>
                      <td>{one.name}</td>
                      <td>
                        <span class={`chip ${one.live ? "good" : "bad"}`}>{one.live ? "live" : "starting again"}</span>
                      </td>
                      <td class="right num">{plain(one.running)}</td>
                      <td class="right num">{plain(one.waiting)}</td>
                      <td>
                        <Bar part={one.cacheUse} whole={1} said={`${Math.round(100 * one.cacheUse)} %`} />
                      </td>
                      <td class="right num">{plain(one.restarts)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
        </>
      )}
    </section>
  );
}

/** Which engine serves which model, in words; asked again when its weights change. Empty until it is known. */
function useServed(version: bigint | undefined): string {
  const words = useSignal("");
  useEffect(() => {
    if (version === undefined) return;
    const abort = new AbortController();
    client(InferenceService)
      .getInfo({}, { signal: abort.signal })
      .then(
        (info) => (words.value = servedWords(info)),
        () => (words.value = ""), // the stream beside it says what is wrong
      );
    return () => abort.abort();
  }, [version]);
  return words.value;
}

/** The most sandboxes that a service returns; the page shows their sums. */
const MOST_TOLD = 1000;
/** Lines of the table, the newest sandboxes: each has a clock. */
const MOST_LINES = 200;
/** The labels by which the driver finds its sandboxes. */
const ROLLOUT_LABEL = "penstock_rollout";

function Sandboxes({ fleet, chosen }: Chosen) {
  const { message, following } = useStream<WatchSandboxesResponse>("watch the sandboxes", async function* (signal) {
    const request = create(WatchSandboxesRequestSchema, { allNamespaces: await seesAll("sandbox"), most: MOST_TOLD });
    yield* client(SandboxService, chosen.peek()).watchSandboxes(request, { signal, timeoutMs: 0 });
  });
  return (
    <section class="card part" aria-labelledby="sandboxes-title">
      <div class="title">
        <h2 id="sandboxes-title">Sandboxes</h2>
        <Choice kind="sandbox" fleet={fleet} chosen={chosen} />
      </div>
      <FollowingNotice following={following.value} />
      {message.value && <SandboxUsage told={message.value} />}
    </section>
  );
}

/** What they use together, and the newest of them one by one. */
export function SandboxUsage({ told: { sandboxes, count } }: { told: WatchSandboxesResponse }) {
  const memory = sandboxes.reduce((sum, one) => sum + Number(one.stats?.memoryBytes ?? 0n), 0);
  const processes = sandboxes.reduce((sum, one) => sum + (one.stats?.pids ?? 0), 0);
  const newest = count > sandboxes.length ? `of the newest ${plain(sandboxes.length)}` : "";
  return (
    <>
      <div class="measures">
        <Measure name="Sandboxes" value={plain(count)} />
        <Measure name="Memory" value={bytes(memory)} note={`of those${newest && ` ${newest}`} that report it`} />
        <Measure name="Processes" value={plain(processes)} note={newest} />
      </div>
      {sandboxes.length > 0 && <SandboxTable usages={sandboxes.slice(0, MOST_LINES)} count={count} />}
    </>
  );
}

function SandboxTable({ usages, count }: { usages: readonly WatchSandboxesResponse_Usage[]; count: number }) {
  return (
    <div class="scroll">
      <table>
        <caption class="visually-hidden">Sandboxes and what they use</caption>
        <thead>
          <tr>
            <th scope="col">Sandbox</th>
            <th scope="col">State</th>
            <th scope="col">Backend</th>
            <th scope="col">Rollout</th>
            <th scope="col">Memory</th>
            <th scope="col" class="right">CPU time</th>
            <th scope="col" class="right">Processes</th>
            <th scope="col" class="right">Disk</th>
            <th scope="col" class="right">Lease ends in</th>
          </tr>
        </thead>
        <tbody>
          {usages.map(({ sandbox, stats }) => {
            if (!sandbox) return null;
            const rollout = sandbox.spec?.labels[ROLLOUT_LABEL];
            const limit = sandbox.spec?.resources?.memoryBytes;
            const used = stats?.memoryBytes;
            return (
              <tr key={sandbox.sandboxId}>
                <td class="mono" title={sandbox.sandboxId}>
                  {shortId(sandbox.sandboxId)}
                </td>
                <td>
                  <span class={`chip ${sandbox.state === SandboxState.READY ? "good" : sandbox.state === SandboxState.LOST ? "bad" : ""}`}>
                    {(SandboxState[sandbox.state] ?? "unknown").toLowerCase()}
                  </span>
                </td>
                <td>{sandbox.spec?.backend}</td>
                <td>
                  {rollout ? (
                    <a class="mono" href={href("/rollouts", rollout)} title={rollout}>
                      {shortId(rollout)}
                    </a>
                  ) : (
                    <span class="muted">–</span>
                  )}
                </td>
                <td class="num">
                  {used === undefined ? (
                    <span class="muted">–</span>
                  ) : limit ? (
                    <Bar part={Number(used)} whole={Number(limit)} said={`${bytes(Number(used))} of ${bytes(Number(limit))}`} />
                  ) : (
                    bytes(Number(used))
                  )}
                </td>
                <td class="right num">{stats?.cpuTime ? duration(durationMs(stats.cpuTime)) : "–"}</td>
                <td class="right num">{stats?.pids === undefined ? "–" : plain(stats.pids)}</td>
                <td class="right num">{stats?.diskBytes === undefined ? "–" : bytes(Number(stats.diskBytes))}</td>
                <td class="right num">
                  {sandbox.expireTime ? duration(Math.max(0, timestampMs(sandbox.expireTime) - now.value)) : "–"}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {count > usages.length && <p class="muted">and {plain(count - usages.length)} more, older ones</p>}
    </div>
  );
}

function Measure(props: { name: string; value: string; note?: string; tone?: string; children?: preact.ComponentChildren }) {
  return (
    <div class={`measure ${props.tone ?? ""}`}>
      <span class="muted">{props.name}</span>
      <strong class="num">{props.value}</strong>
      {props.note && <span class="muted num">{props.note}</span>}
      {props.children}
    </div>
  );
}

function Bar({ part, whole, said }: { part: number; whole: number; said: string }) {
  const share = whole > 0 ? Math.min(1, part / whole) : 0;
  return (
    <span class="bar">
      <span class="track" aria-hidden="true">
        <span class={share > 0.9 ? "fill full" : "fill"} style={{ width: `${100 * share}%` }} />
      </span>
      <span class="num">{said}</span>
    </span>
  );
}
