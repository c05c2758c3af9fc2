// Who is looking: the bearer token that goes with every request.
//
// `penstock up` prints an address that ends in #token=...; a fragment is not sent to any server and stands in no log. The token is
// taken out of the address bar at once and kept for as long as the tab lives.
import { signal } from "@preact/signals";

const KEY = "penstock.token";

/** The token; empty = nobody has given one yet. */
export const token = signal("");

/** What a fragment says: a token, and the route to go on to. Null where it is an ordinary route. */
export function parseTokenFragment(hash: string): { token: string; route: string } | null {
  const text = hash.replace(/^#/, "");
  if (!text.startsWith("token=")) return null;
  const given = new URLSearchParams(text);
  return { token: given.get("token") ?? "", route: given.get("go") ?? "/" };
}

/** Takes the token from the address bar, else from this tab's storage. To be called once, before anything is rendered. */
export function startSession(): void {
  const given = parseTokenFragment(location.hash);
  if (given) {
    history.replaceState(null, "", `#${given.route}`);
    setToken(given.token);
    return;
  }
  token.value = sessionStorage.getItem(KEY) ?? "";
}

/** From now on; the streams that run begin anew with it. */
export function setToken(value: string): void {
  const trimmed = value.trim();
  if (trimmed) sessionStorage.setItem(KEY, trimmed);
  else sessionStorage.removeItem(KEY);
  token.value = trimmed;
}
