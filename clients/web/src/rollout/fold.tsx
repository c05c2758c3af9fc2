/** Something that a reader may open, and that is made only then. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

interface Props {
  readonly summary: ComponentChildren;
  readonly class?: string;
  readonly isOpen?: boolean;
  readonly children: () => ComponentChildren;
}

export function Fold({ summary, class: name, isOpen = false, children }: Props) {
  const [wasOpened, setOpened] = useState(isOpen);
  return (
    <details class={name} open={isOpen} onToggle={(event) => event.currentTarget.open && setOpened(true)}>
      <summary>{summary}</summary>
      {wasOpened && children()}
    </details>
  );
}
