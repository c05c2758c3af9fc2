// What there is, and the module that shows it; each is loaded when it is first gone to.
import type { Route } from "./lib/router";

export const routes: readonly Route[] = [
  { pattern: "/", title: () => "Rollouts", load: () => import("./overview/page") },
  { pattern: "/new", title: () => "New rollout", load: () => import("./start/page") },
  { pattern: "/services", title: () => "Services", load: () => import("./services/page") },
  { pattern: "/rollouts/:id", title: ({ id }) => `Rollout ${id ?? ""}`, load: () => import("./rollout/page") },
  { pattern: "/groups/:id", title: ({ id }) => `Group ${id ?? ""}`, load: () => import("./compare/page") },
];
