// What stands around each page: the name, where one can go, theme, token, help.
import { useComputed, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Component, type ComponentChildren } from "preact";

import { type Key, useKeys } from "./lib/keys";
import { go, href, location_, match, type Match, type Page } from "./lib/router";
import { token } from "./lib/session";
import { nextTheme, theme } from "./lib/theme";
import { routes } from "./routes";
import "./shell.css";
import { Help, helpOpen, TokenSheet, tokenOpen } from "./ui/dialogs";
import { showViews, ViewsSheet } from "./ui/views";

const PLACES = [
  ["/", "Rollouts"],
  ["/runs", "Runs"],
  ["/tasks", "Tasks"],
  ["/agents", "Agents"],
  ["/services", "Services"],
  ["/new", "New rollout"],
] as const;

const KEYS: readonly Key[] = [
  { key: "?", does: "these keys", run: () => (helpOpen.value = true) },
  { key: "o", does: "rollouts", run: () => go("/") },
  { key: "r", does: "runs", run: () => go("/runs") },
  { key: "a", does: "tasks", run: () => go("/tasks") },
  { key: "v", does: "saved views", run: showViews },
  { key: "s", does: "services", run: () => go("/services") },
  { key: "n", does: "start a rollout", run: () => go("/new") },
  { key: "t", does: "dark, light, or as the system", run: nextTheme },
];

export function Shell() {
  useKeys(KEYS);
  const here = useComputed(() => match(routes, location_.value));
  const path = location_.value.split("?")[0];
  return (
    <div class="shell">
      <a class="skip button" href="#main" onClick={skip}>
        To the content
      </a>
      <header>
        <a class="brand" href={href("/")}>
          <img src="./icon.svg" alt="" /> Penstock
        </a>
        <nav aria-label="Pages">
          {PLACES.map(([place, name]) => (
            <a key={place} href={href(place)} aria-current={path === place || (place !== "/" && path?.startsWith(`${place}/`)) ? "page" : undefined}>
              {name}
            </a>
          ))}
        </nav>
        <div class="tools">
          <button type="button" class="button quiet" onClick={() => (tokenOpen.value = true)}>
            Token
          </button>
          <button type="button" class="button quiet" onClick={nextTheme} aria-label={`Theme: ${theme.value}. Change`}>
            {theme.value === "dark" ? "Dark" : theme.value === "light" ? "Light" : "Auto"}
          </button>
          <button type="button" class="button quiet" onClick={() => (helpOpen.value = true)} aria-label="Keys">
            ?
          </button>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {!token.value ? <NoToken /> : here.value ? <Outlet found={here.value} /> : <Nowhere />}
      </main>
      <Help />
      <TokenSheet />
      <ViewsSheet />
    </div>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function NoToken() {
  return (
    <div class="empty">
      <h1>No token yet</h1>
      <p>
        Open the address that <code>penstock up</code> or <code>penstock dashboard</code> printed: it carries one. Or paste it
        here.
      </p>
      <p>
        <button type="button" class="button primary" onClick={() => (tokenOpen.value = true)}>
          Paste a token
        </button>
      </p>
    </div>
  );
}

function Nowhere() {
  return (
    <div class="empty">
      <h1>There is no such page</h1>
      <p>
        <a href={href("/")}>To the rollouts</a>
      </p>
    </div>
  );
}

function Outlet({ found }: { found: Match }) {
  const page = useSignal<{ pattern: string; module: Page } | null>(null);
  const failed = useSignal("");
  const { route } = found;
  useEffect(() => {
    let wanted = true;
    failed.value = "";
    route.load().then(
      (module) => {
        if (wanted) page.value = { pattern: route.pattern, module };
      },
      (error: unknown) => {
        if (wanted) failed.value = String(error);
      },
    );
    return () => {
      wanted = false;
    };
  }, [route]);
  const id = Object.values(found.params).join(" ");
  useEffect(() => {
    document.title = `${route.title(found.params)} - Penstock`;
  }, [route, id]);
  if (failed.value)
    return (
      <div class="empty" role="alert">
        <h1>This part of the page could not be loaded</h1>
        <p>The dashboard was updated or stopped. {failed.value}</p>
        <p>
          <button type="button" class="button" onClick={() => globalThis.location.reload()}>
            Load it again
          </button>
        </p>
      </div>
    );
  if (page.value?.pattern !== route.pattern) return null;
  const Content = page.value.module.default;
  return (
    <Fence key={`${route.pattern} ${id}`}>
      <Content params={found.params} query={found.query} />
    </Fence>
  );
}

/** A page that breaks says so and leaves the rest standing. */
class Fence extends Component<{ children: ComponentChildren }, { failure: string }> {
  override state = { failure: "" };

  override componentDidCatch(error: unknown): void {
    console.error(error);
    this.setState({ failure: String(error) });
  }

  override render() {
    if (!this.state.failure) return this.props.children;
    return (
      <div class="empty" role="alert">
        <h1>This page broke</h1>
        <p>It is a fault of the dashboard. {this.state.failure}</p>
        <p>
          <button type="button" class="button" onClick={() => this.setState({ failure: "" })}>
            Show it again
          </button>
        </p>
      </div>
    );
  }
}
