// The two sheets that every page has: which keys there are, and who is looking.
import { type Signal, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { ComponentChildren } from "preact";

import { keys } from "../lib/keys";
import { setToken, token } from "../lib/session";

export const helpOpen = signal(false);
export const tokenOpen = signal(false);

/** A modal sheet that is open while its signal is true. */
export function Sheet({ open, title, children }: { open: Signal<boolean>; title: string; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const wanted = open.value;
  useEffect(() => {
    const element = dialog.current;
    if (!element) return;
    if (wanted && !element.open) element.showModal();
    if (!wanted && element.open) element.close();
  }, [wanted]);
  return (
    <dialog class="sheet" ref={dialog} aria-label={title} onClose={() => (open.value = false)}>
      {wanted && (
        <>
          <h1>{title}</h1>
          {children}
        </>
      )}
    </dialog>
  );
}

/** What the keyboard can do here. */
export function Help() {
  return (
    <Sheet open={helpOpen} title="Keys">
      <dl>
        {keys.value.map((item) => (
          <>
            <dt>
              <kbd>{item.key}</kbd>
            </dt>
            <dd>{item.does}</dd>
          </>
        ))}
      </dl>
      <form method="dialog" class="actions">
        <button class="button" type="submit">
          Close
        </button>
      </form>
    </Sheet>
  );
}

/** Takes another token. */
export function TokenSheet() {
  const field = useRef<HTMLInputElement>(null);
  return (
    <Sheet open={tokenOpen} title="Token">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          setToken(field.current?.value ?? "");
          tokenOpen.value = false;
        }}
      >
        <p class="muted">
          What you see is what the token's role may see. It stays in this tab and goes to the services only.
        </p>
        <input
          class="field mono"
          type="password"
          autocomplete="off"
          aria-label="Token"
          placeholder={token.value ? "another token" : "token"}
          ref={field}
        />
        <div class="actions">
          <button class="button" type="button" onClick={() => (tokenOpen.value = false)}>
            Leave it
          </button>
          <button class="button primary" type="submit">
            Use it
          </button>
        </div>
      </form>
    </Sheet>
  );
}
