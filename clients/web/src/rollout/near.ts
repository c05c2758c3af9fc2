/** Whether an element is in view or close to it; once it was, it stays so. */

import type { RefObject } from "preact";
import { useEffect, useState } from "preact/hooks";

/** What is this close is made ready before somebody scrolls to it. */
const MARGIN = "800px 0px";

export function useNear(element: RefObject<HTMLElement | null>): boolean {
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const target = element.current;
    if (isNear || !target) return;
    const observer = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) setNear(true);
      },
      { rootMargin: MARGIN },
    );
    observer.observe(target);
    return () => observer.disconnect();
  }, [isNear]);
  return isNear;
}

/** Whether an element is in view or close to it now, and how high it was when it last was; undefined = it never was. */
export function useInView(element: RefObject<HTMLElement | null>, isWatched: boolean): { isIn: boolean; height: number | undefined } {
  const [state, setState] = useState<{ isIn: boolean; height: number | undefined }>({ isIn: !isWatched, height: undefined });
  useEffect(() => {
    const target = element.current;
    if (!isWatched || !target) return;
    const observer = new IntersectionObserver(
      (entries) => {
        const entry = entries.at(-1);
        if (entry) setState({ isIn: entry.isIntersecting, height: entry.boundingClientRect.height });
      },
      { rootMargin: MARGIN },
    );
    observer.observe(target);
    return () => observer.disconnect();
  }, [isWatched]);
  return state;
}
