// What there is, and the module that shows it; each is loaded when it is first gone to.
import type { Route } from "./lib/router";
import { shortName } from "./ui/name";

export const routes: readonly Route[] = [
  { pattern: "/", title: () => "Rollouts", load: () => import("./overview/page") },
  { pattern: "/runs", title: () => "Runs", load: () => import("./run/all") },
  { pattern: "/runs/:id", title: ({ id }) => `Run ${id ?? ""}`, load: () => import("./run/one") },
  { pattern: "/tasks", title: () => "Tasks", load: async () => ({ default: (await import("./tasks/page")).Tasks }) },
  { pattern: "/tasks/:id", title: ({ id }) => `Task ${id ?? ""}`, load: async () => ({ default: (await import("./tasks/page")).Task }) },
  { pattern: "/tasks/:id/versions", title: ({ id }) => `Versions of task ${id ?? ""}`, load: () => import("./tasks/versionspage") },
  { pattern: "/agents", title: () => "Agents", load: async () => ({ default: (await import("./tasks/page")).Agents }) },
  { pattern: "/agents/:id", title: ({ id }) => `Agent ${id ?? ""}`, load: async () => ({ default: (await import("./tasks/page")).Agent }) },
  { pattern: "/new", title: () => "New rollout", load: () => import("./start/page") },
  { pattern: "/services", title: () => "Services", load: () => import("./services/page") },
  { pattern: "/rollouts/:id", title: ({ id }) => `Rollout ${shortName({ id: id ?? "" })}`, load: () => import("./rollout/page") },
  { pattern: "/groups/:id", title: ({ id }) => `Group ${shortName({ id: id ?? "" })}`, load: () => import("./compare/page") },
];
