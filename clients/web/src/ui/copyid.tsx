// A button that puts an id on the clipboard: what a command line wants, where the page shows a name.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

const SHOWN_MS = 1500;

/** Copies an id, and says so for a moment. */
export function CopyId({ id }: { id: string }) {
  const state = useSignal<"" | "Copied" | "Not copied">("");
  useEffect(() => {
    if (!state.value) return;
    const timer = setTimeout(() => (state.value = ""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [state.value]);
  return (
    <button
      type="button"
      class="button quiet copy"
      title={id}
      aria-label={`Copy the id ${id}`}
      onClick={() => {
        void copied(id).then((isDone) => (state.value = isDone ? "Copied" : "Not copied"));
      }}
    >
      <span aria-live="polite">{state.value || "Copy id"}</span>
    </button>
  );
}

/** Puts a text on the clipboard; whether that worked. Browsers allow it on pages that they trust only: https, or this machine. */
export async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
