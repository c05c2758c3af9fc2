// Dark or light: the system's choice until a person chooses.
import { effect, signal } from "@preact/signals";

export type Theme = "system" | "dark" | "light";

const KEY = "penstock.theme";

export const theme = signal<Theme>("system");

/** Reads the person's choice and keeps the document at it. To be called once. */
export function startTheme(): void {
  const kept = localStorage.getItem(KEY);
  if (kept === "dark" || kept === "light") theme.value = kept;
  effect(() => {
    document.documentElement.dataset["theme"] = theme.value;
    if (theme.value === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme.value);
  });
}

/** To the next of system, dark, light. */
export function nextTheme(): void {
  theme.value = theme.value === "system" ? "dark" : theme.value === "dark" ? "light" : "system";
}
