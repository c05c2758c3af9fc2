/** A rollout's page: how it stands and why, what was said token by token, what changed, and what it was worth. */

import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { Phase, type RolloutEvent } from "@gen/penstock/driver/v1/rollout_pb";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import { type Key, useKeys } from "../lib/keys";
import { href, type Params, setQuery } from "../lib/router";
import { findAt } from "../lib/members";
import { client } from "../lib/transport";
import { BranchSheet } from "../ui/branch";
import { askToCancel, CancelSheet } from "../ui/cancel";
import { FollowingNotice, TroubleNotice } from "../ui/notice";
import { CapturePanel, CommandsPanel, HostToolsPanel, RewardPanel, TaskPanel } from "./aside";
import { Conversation } from "./conversation";
import { EventList } from "./eventlist";
import { FilesView } from "./files";
import { Header } from "./header";
import { followRollout, type RolloutModel } from "./model";
import { oneLine } from "./safe";
import { Timeline } from "./timeline";
import { Inspector, Legend } from "./tokenview";
import { turnsOf } from "./tree";
import "./rollout.css";

export default function Page({ params, query }: { params: Params; query: URLSearchParams }) {
  const id = params["id"] ?? "";
  const model = useMemo(() => followRollout(id), [id]);
  useEffect(() => () => model.stop(), [model]);
  if (model.isUnknown.value && !model.rollout.value) return <Unknown id={id} />;
  if (!model.rollout.value) {
    return (
      <>
        <FollowingNotice following={model.following} />
        {model.following.health.value.kind === "connecting" && <p class="empty">Reading the rollout…</p>}
      </>
    );
  }
  return <Known model={model} query={query} />;
}

function Unknown({ id }: { id: string }) {
  return (
    <div class="empty" role="alert">
      <h1>There is no rollout {oneLine(id, 60)}</h1>
      <p>It was deleted, its address is not complete, or it belongs to other services than these.</p>
      <p>
        <a href={href("/")}>All rollouts</a>
      </p>
    </div>
  );
}

const TABS = ["conversation", "events", "files"] as const;
type Tab = (typeof TABS)[number];
const TAB_NAMES: Readonly<Record<Tab, string>> = { conversation: "Conversation", events: "Events", files: "Files" };

function Known({ model, query }: { model: RolloutModel; query: URLSearchParams }) {
  const rollout = model.rollout.value;
  const asked = query.get("tab");
  const tab: Tab = TABS.find((name) => name === asked) ?? usualTab(model);
  const siblings = useSiblings(rollout?.groupId);
  useCall(query.get("call"), model);
  const keys = useMemo<readonly Key[]>(
    () => [
      { key: "j", does: "next call", run: () => step(model, 1) },
      { key: "k", does: "call before", run: () => step(model, -1) },
      ...TABS.map((name, index): Key => ({ key: String(index + 1), does: TAB_NAMES[name].toLowerCase(), run: () => choose(name) })),
      { key: "g", does: "compare with the siblings of its group", run: () => compare(model) },
      { key: "c", does: "cancel the rollout", run: () => cancel(model) },
    ],
    [model],
  );
  useKeys(keys);
  if (!rollout) return null;
  const events = model.events.value;
  return (
    <div class="rollout">
      {model.isUnknown.value && (
        <div class="notice bad" role="alert">
          <div class="grow">
            <strong>This rollout was deleted meanwhile.</strong> What you see is what the page had read of it.
          </div>
        </div>
      )}
      {!model.isUnknown.value && <FollowingNotice following={model.following} />}
      <Header rollout={rollout} capture={model.capture.value} siblings={siblings} />
      <div class="rollout-time card">
        <Timeline events={events} />
      </div>
      <div class="rollout-columns">
        <div class="rollout-main card">
          <div class="tabs" role="tablist" aria-label="What is shown">
            {TABS.map((name) => (
              <button key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={tab === name} aria-controls="tabpanel" tabIndex={tab === name ? 0 : -1} onClick={() => choose(name)} onKeyDown={turnTabs}>
                {TAB_NAMES[name]} <TabCount tab={name} model={model} events={events} />
              </button>
            ))}
          </div>
          <div id="tabpanel" role="tabpanel" aria-labelledby={`tab-${tab}`} class="tabpanel">
            {tab === "conversation" && <ConversationTab model={model} />}
            {tab === "events" && <EventList events={events} dropped={model.droppedEvents.value} />}
            {tab === "files" && <FilesView events={events} rollout={rollout} />}
          </div>
        </div>
        <aside class="rollout-aside">
          <RewardPanel rollout={rollout} capture={model.capture.value} />
          <CommandsPanel title="Verifier" phase={Phase.VERIFYING} events={events} none={rollout.spec?.task?.verifier ? "It has not run." : "The task has none."} />
          <CommandsPanel title="Setup" phase={Phase.SETTING_UP} events={events} none={(rollout.spec?.task?.setup.length ?? 0) > 0 ? "It was done for another rollout that shares this prepared state, or has not run yet." : "The task has none."} />
          <TaskPanel rollout={rollout} />
          <CapturePanel capture={model.capture.value} isEnded={rollout.phase === Phase.ENDED} isRead={model.isCaptureRead.value} />
          <HostToolsPanel capture={model.capture.value} />
        </aside>
      </div>
      <Inspector />
      <CancelSheet />
      <BranchSheet />
    </div>
  );
}

/** The conversation, but of a rollout that failed before there was one what happened instead. */
function usualTab(model: RolloutModel): Tab {
  const isSilent = model.rollout.value?.outcome?.failure !== undefined && model.capture.value.calls.length === 0;
  return isSilent && model.isCaptureRead.value && !model.captureTrouble.value ? "events" : "conversation";
}

function TabCount({ tab, model, events }: { tab: Tab; model: RolloutModel; events: readonly RolloutEvent[] }) {
  const count = tab === "conversation" ? model.capture.value.calls.length : tab === "events" ? events.length + model.droppedEvents.value : 0;
  return count > 0 ? <span class="muted num">{count.toLocaleString("en")}</span> : null;
}

function ConversationTab({ model }: { model: RolloutModel }) {
  const trouble = model.captureTrouble.value;
  const roots = model.tree.value;
  const isEnded = model.rollout.value?.phase === Phase.ENDED;
  return (
    <>
      {trouble && <TroubleNotice trouble={trouble} onRetry={model.retryCapture} />}
      {model.vocabularyNote.value !== "" && <p class="notice">{model.vocabularyNote.value}</p>}
      {roots.length > 0 ? (
        <>
          <Legend />
          <Conversation roots={roots} vocabulary={model.vocabulary} />
        </>
      ) : (
        !trouble && <Silence isEnded={isEnded} />
      )}
    </>
  );
}

function Silence({ isEnded }: { isEnded: boolean }): ComponentChildren {
  return <p class="empty">{isEnded ? "It ended before the agent asked the model anything, or nothing of its calls was captured." : "The agent has not asked the model yet."}</p>;
}

function choose(tab: Tab): void {
  const query = new URLSearchParams();
  query.set("tab", tab);
  setQuery(query);
}

function turnTabs(event: KeyboardEvent): void {
  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  const from = event.currentTarget;
  if (by === 0 || !(from instanceof HTMLElement)) return;
  const next = by > 0 ? from.nextElementSibling : from.previousElementSibling;
  if (!(next instanceof HTMLElement)) return;
  event.preventDefault();
  next.click();
  next.focus();
}

/** Goes to the call after or before the one at the top of the window. */
function step(model: RolloutModel, by: 1 | -1): void {
  const elements = turnsOf(model.tree.peek()).flatMap(({ call }) => document.getElementById(`call-${call.callId}`) ?? []);
  const top = 140;
  const target =
    by > 0
      ? elements.find((element) => element.getBoundingClientRect().top > top + 4)
      : elements.findLast((element) => element.getBoundingClientRect().top < top - 4);
  target?.scrollIntoView({ block: "start" });
}

function cancel(model: RolloutModel): void {
  if (model.rollout.peek()?.phase !== Phase.ENDED) askToCancel("rollout", model.id);
}

function compare(model: RolloutModel): void {
  const groupId = model.rollout.peek()?.groupId;
  if (groupId !== undefined) location.hash = `${href("/groups", groupId)}?left=${encodeURIComponent(model.id)}`;
}

/** The rollouts of a group, in order; empty until they are known. */
function useSiblings(groupId: string | undefined): readonly string[] {
  const siblings = useSignal<readonly string[]>([]);
  useEffect(() => {
    if (groupId === undefined) return;
    const abort = new AbortController();
    findAt(groupId, (driver) => client(RolloutService, driver).getGroup({ groupId }, { signal: abort.signal }))
      .then(
        ({ group }) => {
          siblings.value = group?.rolloutIds ?? [];
        },
        () => {
          siblings.value = []; // the link to the group stays, and its page says what is wrong
        },
      );
    return () => abort.abort();
  }, [groupId]);
  return siblings.value;
}

/** Scrolls to the call that the address names, once it is there. */
function useCall(callId: string | null, model: RolloutModel): void {
  const isThere = callId !== null && model.capture.value.calls.some((call) => call.callId === callId);
  useEffect(() => {
    if (isThere) document.getElementById(`call-${callId}`)?.scrollIntoView({ block: "start" });
  }, [callId, isThere]);
}

