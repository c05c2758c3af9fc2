// Starts a rollout, or a group of them.
import { type Signal, useSignal } from "@preact/signals";
import { create } from "@bufbuild/protobuf";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type Agent, AgentService } from "@gen/penstock/driver/v1/agent_service_pb";
import { CreateGroupRequestSchema, CreateRolloutRequestSchema, RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import { Mode } from "@gen/penstock/interception/v1/interception_pb";
import { type Backend } from "@gen/penstock/sandbox/v1/sandbox_pb";
import { SandboxService } from "@gen/penstock/sandbox/v1/sandbox_service_pb";

import { explain, type Trouble } from "../lib/errors";
import { follow, type Following, once } from "../lib/follow";
import { go } from "../lib/router";
import { client } from "../lib/transport";
import { FollowingNotice, TroubleNotice } from "../ui/notice";
import { EMPTY, errorLine, type FieldErrors, type Form, FormError, LABELS, placed, specOf } from "./order";
import "./start.css";

const DRAFT = "penstock.draft";

const MODES: readonly (readonly [Mode, string, string])[] = [
  [Mode.TRANSPARENT_PROXY, "Transparent proxy: the engine answers", "The inference service or an upstream answers at once; every call is captured."],
  [Mode.INTERCEPTION_GATE, "Interception gate: a trainer answers", "Every call waits at the gate until a trainer answers it."],
  [Mode.BLACK_BOX, "Black box: an upstream answers", "The bytes pass unread; only the outcome is kept."],
];

const EXAMPLE = `instruction: Write the word hello into out.txt.
setup:
  - touch out.txt
verifier:
  commands:
    - grep -q hello out.txt
`;

function draft(): Form {
  try {
    return { ...EMPTY, ...(JSON.parse(sessionStorage.getItem(DRAFT) ?? "{}") as Partial<Form>), apiKey: "" };
  } catch {
    return EMPTY;
  }
}

export default function Start() {
  const form = useSignal<Form>(draft());
  const errors = useSignal<FieldErrors>({});
  const trouble = useSignal<Trouble | null>(null);
  const busy = useSignal(false);
  const agents = useSignal<readonly Agent[]>([]);
  const backends = useSignal<readonly Backend[]>([]);
  const lists = useSignal<readonly Following[]>([]);
  // The same until something of the form changes: a repeated request makes no second rollout.
  const requestId = useRef("");
  const element = useRef<HTMLFormElement>(null);

  // Each list by itself, and until the service answers: the form is of use with one of them.
  useEffect(() => {
    const agentsList = follow(
      "list the agents",
      (signal) => once(client(AgentService).listAgents({ pageSize: 1000 }, { signal })),
      (found) => {
        agents.value = found.agents;
        if (!form.value.agent && found.agents.length)
          set("agent", (found.agents.find((item) => item.spec?.name === "shell") ?? found.agents[0])?.spec?.name ?? "");
      },
      false,
    );
    const backendsList = follow(
      "list the sandbox backends",
      (signal) => once(client(SandboxService).listBackends({}, { signal })),
      (found) => {
        backends.value = found.backends;
      },
      false,
    );
    lists.value = [agentsList, backendsList];
    return () => lists.value.forEach((list) => list.stop());
  }, []);

  function set<K extends keyof Form>(name: K, value: Form[K]): void {
    form.value = { ...form.value, [name]: value };
    requestId.current = "";
    if (errors.value[name]) errors.value = { ...errors.value, [name]: [] };
    sessionStorage.setItem(DRAFT, JSON.stringify({ ...form.value, apiKey: "" }));
  }

  async function submit(): Promise<void> {
    errors.value = {};
    trouble.value = null;
    busy.value = true;
    const asked = form.value;
    requestId.current ||= crypto.randomUUID();
    try {
      const spec = specOf(asked);
      const driver = client(RolloutService);
      const options = { timeoutMs: 60_000 };
      if (asked.count > 1) {
        const request = create(CreateGroupRequestSchema, { requestId: requestId.current, spec, size: asked.count });
        go("/groups", (await driver.createGroup(request, options)).group?.groupId ?? "");
      } else {
        const request = create(CreateRolloutRequestSchema, { requestId: requestId.current, spec });
        go("/rollouts", (await driver.createRollout(request, options)).rollout?.rolloutId ?? "");
      }
    } catch (error) {
      if (error instanceof FormError) errors.value = error.errors;
      else {
        const told = explain(error, "start the rollout");
        errors.value = placed(told.violations, asked);
        // What the service says of a request's fields is said by the names that they have here.
        trouble.value = told.violations.length ? { ...told, said: errorLine(errors.value) } : told;
      }
      requestAnimationFrame(() => element.current?.querySelector<HTMLElement>("[aria-invalid=true]")?.focus());
    } finally {
      busy.value = false;
    }
  }

  const values = form.value;
  const chosen = agents.value.find((item) => item.spec?.name === values.agent)?.spec;
  const mode = MODES.find(([item]) => item === values.mode);
  const field = { form, errors, set };
  return (
    <form
      class="start"
      ref={element}
      noValidate
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <h1>New rollout</h1>
      {lists.value.map((list, index) => (
        <FollowingNotice key={index} following={list} />
      ))}
      <div class="columns">
        <section class="card" aria-label="Task">
          <div class="switch" role="group" aria-label="How the task is given">
            <button type="button" class="button quiet" aria-pressed={values.how === "written"} onClick={() => set("how", "written")}>
              Write a task
            </button>
            <button type="button" class="button quiet" aria-pressed={values.how === "yaml"} onClick={() => set("how", "yaml")}>
              Paste a task file
            </button>
          </div>
          {values.how === "yaml" ? (
            <Area {...field} name="yaml" rows={16} placeholder={EXAMPLE} mono />
          ) : (
            <>
              <Area {...field} name="instruction" rows={5} placeholder="The agent's instruction, byte for byte." />
              <Area {...field} name="setup" rows={2} placeholder="Shell lines, run once before the agent" mono />
              <Area {...field} name="verify" rows={3} placeholder="Shell lines, run after the agent; the reward is the share that passes" mono />
              <Line {...field} name="taskId" />
              <label class="check">
                <input type="checkbox" checked={values.keepDiff} onChange={(event) => set("keepDiff", event.currentTarget.checked)} />
                {LABELS.keepDiff}
              </label>
            </>
          )}
        </section>
        <section class="card" aria-label="Agent and model">
          <Labelled {...field} name="agent" note={chosen?.description ?? ""}>
            {(attributes) => (
              <select class="field" {...attributes} value={values.agent} onChange={(event) => set("agent", event.currentTarget.value)}>
                {!agents.value.some((item) => item.spec?.name === values.agent) && <option value={values.agent}>{values.agent}</option>}
                {agents.value.map((item) => (
                  <option key={item.spec?.name} value={item.spec?.name}>
                    {item.spec?.name}
                  </option>
                ))}
              </select>
            )}
          </Labelled>
          <Area
            {...field}
            name="options"
            rows={Math.max(2, chosen?.options.length ?? 0)}
            placeholder={chosen?.options.map((item) => `${item.name}: …`).join("\n") || "none"}
            mono
          />
          <Labelled {...field} name="mode" note={mode?.[2] ?? ""}>
            {(attributes) => (
              <select class="field" {...attributes} value={values.mode} onChange={(event) => set("mode", Number(event.currentTarget.value))}>
                {MODES.map(([value, name]) => (
                  <option key={value} value={value}>
                    {name}
                  </option>
                ))}
              </select>
            )}
          </Labelled>
          <Labelled {...field} name="endpoint" note="">
            {(attributes) => (
              <select
                class="field"
                {...attributes}
                value={values.endpoint}
                onChange={(event) => set("endpoint", event.currentTarget.value as Form["endpoint"])}
              >
                <option value="inference">Inference service</option>
                <option value="upstream">Upstream that the operator named</option>
                <option value="caller">Address of your own</option>
              </select>
            )}
          </Labelled>
          {values.endpoint === "caller" ? (
            <>
              <Line {...field} name="baseUrl" placeholder="http://127.0.0.1:8000/v1" />
              <Line {...field} name="apiKey" secret placeholder="kept in memory only" />
            </>
          ) : (
            <Line {...field} name="name" placeholder={values.endpoint === "inference" ? "the default one" : "as configured"} />
          )}
          {values.endpoint !== "inference" && <Line {...field} name="model" placeholder="as the agent asks" />}
          <div class="pair">
            <Labelled {...field} name="count" note={values.count > 1 ? "a group" : ""}>
              {(attributes) => (
                <input
                  class="field"
                  type="number"
                  min={1}
                  max={256}
                  {...attributes}
                  value={values.count}
                  onInput={(event) => set("count", event.currentTarget.valueAsNumber)}
                />
              )}
            </Labelled>
            <Labelled {...field} name="backend" note="">
              {(attributes) => (
                <select class="field" {...attributes} value={values.backend} onChange={(event) => set("backend", event.currentTarget.value)}>
                  <option value="">default</option>
                  {backends.value.map((item) => (
                    <option key={item.name} value={item.name} disabled={!item.available}>
                      {item.available ? item.name : `${item.name} (not available)`}
                    </option>
                  ))}
                </select>
              )}
            </Labelled>
            <Line {...field} name="agentMinutes" placeholder="default" />
            <Line {...field} name="maxCalls" placeholder="no limit" />
            <Line {...field} name="run" placeholder="none" />
            <Line {...field} name="labels" placeholder="team=a step=3" />
          </div>
        </section>
      </div>
      {trouble.value && <TroubleNotice trouble={trouble.value} />}
      <div class="actions">
        <button type="submit" class="button primary" disabled={busy.value}>
          {busy.value ? "Starting…" : values.count > 1 ? `Start ${values.count} rollouts` : "Start the rollout"}
        </button>
      </div>
    </form>
  );
}

interface FieldProps {
  form: Signal<Form>;
  errors: Signal<FieldErrors>;
  set: <K extends keyof Form>(name: K, value: Form[K]) => void;
  name: keyof Form;
}

interface Attributes {
  id: string;
  "aria-invalid": boolean;
  "aria-describedby": string;
}

function Labelled(props: FieldProps & { note: string; children: (attributes: Attributes) => ComponentChildren }) {
  const wrong = props.errors.value[props.name] ?? [];
  const id = `field-${props.name}`;
  return (
    <div class="labelled">
      <label for={id}>{LABELS[props.name]}</label>
      {props.children({ id, "aria-invalid": wrong.length > 0, "aria-describedby": `${id}-note` })}
      <div id={`${id}-note`} aria-live="polite">
        {wrong.map((text) => (
          <p class="wrong" key={text}>
            {text}
          </p>
        ))}
        {props.note && <p class="muted">{props.note}</p>}
      </div>
    </div>
  );
}

function Line(props: FieldProps & { placeholder?: string; secret?: boolean }) {
  return (
    <Labelled {...props} note="">
      {(attributes) => (
        <input
          class="field"
          type={(props.secret ? "password" : "text") as "text"}
          autocomplete="off"
          spellcheck={false}
          placeholder={props.placeholder ?? ""}
          {...attributes}
          value={String(props.form.value[props.name])}
          onInput={(event) => props.set(props.name, event.currentTarget.value)}
        />
      )}
    </Labelled>
  );
}

function Area(props: FieldProps & { rows: number; placeholder: string; mono?: boolean }) {
  return (
    <Labelled {...props} note="">
      {(attributes) => (
        <textarea
          class={props.mono ? "field mono" : "field"}
          rows={props.rows}
          spellcheck={!props.mono}
          placeholder={props.placeholder}
          {...attributes}
          value={String(props.form.value[props.name])}
          onInput={(event) => props.set(props.name, event.currentTarget.value)}
        />
      )}
    </Labelled>
  );
}
