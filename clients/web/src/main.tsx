import { render } from "preact";

import { startClock } from "./lib/clock";
import { startKeys } from "./lib/keys";
import { startRouter } from "./lib/router";
import { startSession } from "./lib/session";
import { startTheme } from "./lib/theme";
import { startViews } from "./lib/views";
import { Shell } from "./shell";
import "./theme.css";

startSession();
startTheme();
startViews();
// Before the router listens: a link of `penstock up` that is opened in this tab changes the fragment only.
window.addEventListener("hashchange", startSession);
startRouter();
startKeys();
startClock();
const root = document.getElementById("app");
if (root) render(<Shell />, root);
