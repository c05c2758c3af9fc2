// Draws components without a browser, for tests: what they say, and what they do as they come and go.
//
// Only what Preact needs of a document is here. Nothing has a size, and nobody clicks.
import { type ComponentChild, render } from "preact";
import { act } from "preact/test-utils";

class Node {
  readonly style = {};
  parentNode: Node | null = null;
  childNodes: Node[] = [];
  readonly attributes = new Map<string, string>();
  data = "";

  constructor(
    readonly nodeType: number,
    readonly localName: string,
  ) {}

  get ownerDocument() {
    return DOCUMENT;
  }
  get firstChild(): Node | null {
    return this.childNodes[0] ?? null;
  }
  get nextSibling(): Node | null {
    const all = this.parentNode?.childNodes ?? [];
    return all[all.indexOf(this) + 1] ?? null;
  }
  insertBefore(node: Node, before: Node | null): void {
    node.remove();
    const at = before ? this.childNodes.indexOf(before) : this.childNodes.length;
    this.childNodes.splice(at, 0, node);
    node.parentNode = this;
  }
  remove(): void {
    const all = this.parentNode?.childNodes ?? [];
    if (all.includes(this)) all.splice(all.indexOf(this), 1);
    this.parentNode = null;
  }
  setAttribute(name: string, value: unknown): void {
    this.attributes.set(name, String(value));
  }
  removeAttribute(name: string): void {
    this.attributes.delete(name);
  }
  addEventListener(): void {}
  removeEventListener(): void {}
  getBoundingClientRect(): { top: number; width: number } {
    return { top: 0, width: 0 };
  }
  /** All that is written in it. */
  get text(): string {
    return this.data + this.childNodes.map((node) => node.text).join("");
  }
  /** Those of a class, in the order of the page. */
  ofClass(name: string): Node[] {
    const own = (this.attributes.get("class") ?? "").split(" ").includes(name) ? [this as Node] : [];
    return [...own, ...this.childNodes.flatMap((node) => node.ofClass(name))];
  }
}

const DOCUMENT = {
  createElementNS: (_: string, name: string) => new Node(1, name),
  createTextNode: (data: string) => Object.assign(new Node(3, "#text"), { data }),
};

export interface Drawn {
  readonly root: Node;
  /** Draws something else in its place. */
  show(what: ComponentChild): Promise<void>;
  /** Takes it off the page. */
  leave(): Promise<void>;
}

/** Draws something, effects included. */
export async function drawn(what: ComponentChild): Promise<Drawn> {
  const root = new Node(1, "main");
  const show = async (next: ComponentChild): Promise<void> => {
    await act(() => render(next, root as unknown as Element));
  };
  await show(what);
  return { root, show, leave: () => show(null) };
}
