// The views that this browser keeps: go to one, save what is shown as one, delete one.
import { signal } from "@preact/signals";

import { href, location_ } from "../lib/router";
import { deleteView, MOST_NAME, saveView, views } from "../lib/views";
import { Sheet } from "./dialogs";

const open = signal(false);
const refused = signal("");

/** Opens the sheet. */
export function showViews(): void {
  refused.value = "";
  open.value = true;
}

/** The button that opens the sheet, with the name of the view that is shown. */
export function ViewsButton() {
  const now = views.value.find(({ place }) => place === location_.value);
  return (
    <button type="button" class="button quiet" onClick={showViews} aria-haspopup="dialog">
      {now ? <bdi>View: {now.name}</bdi> : "Views"}
    </button>
  );
}

/** The sheet. To be rendered once. */
export function ViewsSheet() {
  return (
    <Sheet open={open} title="Views">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          refused.value = saveView(String(new FormData(event.currentTarget).get("name") ?? ""), location_.peek());
          if (!refused.peek()) open.value = false;
        }}
      >
        <p class="muted">A view is what the page shows now: filter, order and axes. This browser keeps it; the address shares it with others.</p>
        {views.value.length > 0 && (
          <ul class="views">
            {views.value.map(({ name, place }) => (
              <li key={name}>
                <a href={href(place)} title={place} onClick={() => (open.value = false)}>
                  <bdi>{name}</bdi>
                </a>
                <button type="button" class="button quiet" aria-label={`Delete the view ${name}`} onClick={() => (refused.value = deleteView(name))}>
                  Delete
                </button>
              </li>
            ))}
          </ul>
        )}
        <div class="labelled">
          <label for="view-name">Name</label>
          <input class="field" id="view-name" name="name" autocomplete="off" maxLength={MOST_NAME} aria-invalid={refused.value !== ""} aria-describedby="view-note" />
          <p class="wrong" id="view-note" aria-live="polite">
            {refused.value}
          </p>
        </div>
        <div class="actions">
          <button type="button" class="button" onClick={() => (open.value = false)}>
            Close
          </button>
          <button type="submit" class="button primary">
            Save this view
          </button>
        </div>
      </form>
    </Sheet>
  );
}
