// Asks how many branches continue a rollout from one of its calls, and how, and starts them.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { RolloutService } from "@gen/penstock/driver/v1/rollout_service_pb";
import type { Call } from "@gen/penstock/trajectory/v1/trajectory_pb";

import { explain, type Trouble } from "../lib/errors";
import { driverOf } from "../lib/members";
import { go } from "../lib/router";
import { client } from "../lib/transport";
import { type Continuation, EMPTY, type FieldErrors, LABELS, MOST, orderOf, placed } from "./continuation";
import { Sheet } from "./dialogs";
import { TroubleNotice } from "./notice";

interface Wanted {
  readonly rolloutId: string;
  readonly callId: string;
  readonly index: number;
}

const TIMEOUT_MS = 120_000;
const open = signal(false);
const wanted = signal<Wanted | null>(null);
const form = signal<Continuation>(EMPTY);
const errors = signal<FieldErrors>({});
const trouble = signal<Trouble | null>(null);
const busy = signal(false);
/** The same until something of the form changes: a repeated request makes no second group. */
let requestId = "";

/** Opens the question. A tool call of the recorded answer is there to be changed. */
export function askToBranch(call: Call): void {
  const { rolloutId, callId, index } = call;
  const recorded = call.completion?.message?.parts.find(({ part }) => part.case === "toolCall")?.part;
  wanted.value = { rolloutId, callId, index };
  form.value = recorded?.case === "toolCall" ? { ...EMPTY, name: recorded.value.name, args: recorded.value.argumentsJson } : EMPTY;
  errors.value = {};
  trouble.value = null;
  requestId = "";
  open.value = true;
}

function set<K extends keyof Continuation>(name: K, value: Continuation[K]): void {
  form.value = { ...form.value, [name]: value };
  requestId = "";
  const { [name]: _, ...others } = errors.value;
  errors.value = others;
}

async function branch(): Promise<void> {
  const what = wanted.value;
  if (!what || busy.value) return;
  const asked = form.value;
  const order = orderOf(asked);
  trouble.value = null;
  errors.value = "errors" in order ? order.errors : {};
  if ("errors" in order) return;
  busy.value = true;
  requestId ||= crypto.randomUUID();
  const { rolloutId, callId } = what;
  const request = { ...order, requestId, rolloutId, call: { case: "callId" as const, value: callId } };
  try {
    const { group } = await client(RolloutService, driverOf(rolloutId)).branchRollout(request, { timeoutMs: TIMEOUT_MS });
    open.value = false;
    go("/groups", group?.groupId ?? "");
  } catch (error) {
    const found = explain(error, "continue from this call");
    errors.value = placed(found.violations, asked.kind);
    trouble.value = found;
  } finally {
    busy.value = false;
  }
}

interface Attributes {
  id: string;
  "aria-invalid": boolean;
  "aria-describedby": string;
}

/** A field with its label, what is wrong with it, and a sentence of help. */
function Labelled({ name, help, children }: { name: keyof Continuation; help: ComponentChildren; children: (attributes: Attributes) => ComponentChildren }) {
  const wrong = errors.value[name];
  const id = `branch-${name}`;
  return (
    <div class="labelled">
      <label for={id}>{LABELS[name]}</label>
      {children({ id, "aria-invalid": wrong !== undefined, "aria-describedby": `${id}-note` })}
      <div id={`${id}-note`} aria-live="polite">
        {wrong !== undefined && (
          <p class="wrong">
            {LABELS[name]}: {wrong}
          </p>
        )}
        <p class="muted">{help}</p>
      </div>
    </div>
  );
}

const KINDS: readonly (readonly [Continuation["kind"], string, string])[] = [
  ["model", "The model is asked", "The call is sampled anew in each branch."],
  ["text", "A text", "All branches get this text. Most agents end at a text: then nothing is sampled."],
  ["tool", "A tool call", "All branches get this tool call. Their agents run it, and ask the model what follows."],
];

/** The question. To be rendered once on each page that asks it. */
export function BranchSheet() {
  const what = wanted.value;
  return (
    <Sheet open={open} title={`Continue from call ${what?.index ?? 0}`}>
      <BranchForm />
    </Sheet>
  );
}

function BranchForm() {
  const element = useRef<HTMLFormElement>(null);
  const values = form.value;
  const kind = KINDS.find(([name]) => name === values.kind);
  return (
    <form
      ref={element}
      noValidate
      onSubmit={(event) => {
        event.preventDefault();
        void branch().then(() => requestAnimationFrame(() => element.current?.querySelector<HTMLElement>("[aria-invalid=true]")?.focus()));
      }}
    >
      <p class="muted">
        Each branch has a sandbox of its own. Its agent gets this rollout's answers up to the call, without sampling; from there on the model is asked. In gate mode a
        trainer has to answer, or <code>penstock branch</code>.
      </p>
      <Labelled name="count" help="How many rollouts continue from here. They are a group.">
        {(attributes) => (
          <input class="field" type="number" inputMode="numeric" min={1} max={MOST} {...attributes} value={values.count} onInput={(event) => set("count", event.currentTarget.value)} />
        )}
      </Labelled>
      <Labelled name="kind" help={kind?.[2]}>
        {(attributes) => (
          <select class="field" {...attributes} value={values.kind} onChange={(event) => set("kind", event.currentTarget.value as Continuation["kind"])}>
            {KINDS.map(([value, name]) => (
              <option key={value} value={value}>
                {name}
              </option>
            ))}
          </select>
        )}
      </Labelled>
      {values.kind === "text" && (
        <Labelled name="text" help="The agent gets it as the model's answer. It is never trained.">
          {(attributes) => <textarea class="field" rows={3} {...attributes} value={values.text} onInput={(event) => set("text", event.currentTarget.value)} />}
        </Labelled>
      )}
      {values.kind === "tool" && (
        <>
          <Labelled name="name" help="The tool's name, as the agent offers it to the model.">
            {(attributes) => (
              <input class="field mono" autocomplete="off" autocapitalize="off" spellcheck={false} placeholder="bash" {...attributes} value={values.name} onInput={(event) => set("name", event.currentTarget.value)} />
            )}
          </Labelled>
          <Labelled name="args" help="A JSON object. Empty is an object without fields. The tool call is never trained.">
            {(attributes) => (
              <textarea class="field mono" rows={4} autocapitalize="off" spellcheck={false} placeholder={'{"command": "ls"}'} {...attributes} value={values.args} onInput={(event) => set("args", event.currentTarget.value)} />
            )}
          </Labelled>
        </>
      )}
      <Labelled name="seed" help="The first branch samples with it, each further one with the next number. Empty: branches have this rollout's own seed, if any, and may then all sample the same.">
        {(attributes) => <input class="field" inputMode="numeric" autocomplete="off" placeholder="none" {...attributes} value={values.seed} onInput={(event) => set("seed", event.currentTarget.value)} />}
      </Labelled>
      <div class="labelled">
        <label class="check">
          <input
            type="checkbox"
            aria-describedby="branch-goesOn-note"
            aria-invalid={errors.value.goesOn !== undefined}
            checked={values.goesOn}
            onChange={(event) => set("goesOn", event.currentTarget.checked)}
          />
          {LABELS.goesOn}
        </label>
        <div id="branch-goesOn-note" aria-live="polite">
          {errors.value.goesOn !== undefined && <p class="wrong">{errors.value.goesOn}</p>}
          <p class="muted">
            A branch leaves this rollout too early if a prompt differs before the call, for example because a command printed the time. It fails without a reward. Ticked, it
            goes on: the model is asked from there, and it is graded.
          </p>
        </div>
      </div>
      {trouble.value && <TroubleNotice trouble={trouble.value} />}
      <div class="actions">
        <button type="button" class="button" onClick={() => (open.value = false)}>
          Close
        </button>
        <button type="submit" class="button primary" disabled={busy.value}>
          {busy.value ? "Starting…" : "Start the branches"}
        </button>
      </div>
    </form>
  );
}
