// What pictures of lines share: how wide they are, and round values for their scales.
import { type Signal, useSignal } from "@preact/signals";
import { type RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";

const MOST_TICKS = 8;

/** Round values from low to high, about four of them. */
export function ticks(low: number, high: number): number[] {
  const span = high - low || 1;
  const rough = span / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  const first = Math.ceil(low / step);
  const out: number[] = [];
  // Counted: near 1e16 a step of 0.5 leads nowhere.
  for (let index = 0; index <= MOST_TICKS && (first + index) * step <= high + step / 1e6; index += 1) out.push((first + index) * step);
  return out;
}

/** The width in pixels of the element that gets the reference, as it is now. */
export function useWidth(): { readonly box: RefObject<HTMLDivElement | null>; readonly width: Signal<number> } {
  const box = useRef<HTMLDivElement>(null);
  const width = useSignal(640);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(([entry]) => {
      if (entry) width.value = Math.max(200, entry.contentRect.width);
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return { box, width };
}
