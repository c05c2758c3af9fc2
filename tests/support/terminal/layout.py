"""What of a page a person cannot read: text outside of the window, and a page that scrolls sideways."""

from __future__ import annotations

from typing import Any, Final

from playwright.async_api import Page

# Text inside of a box that scrolls or cuts by itself is reached there, or ends in an ellipsis.
_OUTSIDE: Final = """async () => {
  // Two frames: charts are drawn again for the new width.
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const width = document.documentElement.clientWidth;
  const found = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > width) found.push(`the page is ${wide} pixels wide, the window ${width}`);
  const boxed = (element) => {
    for (let at = element; at && at !== document.body; at = at.parentElement)
      if (at.matches(".skip") || getComputedStyle(at).overflowX !== "visible") return true;
    return false;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode;
    const element = text.parentElement;
    if (!text.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const rects = [...range.getClientRects()];
    const out = rects.some((rect) => rect.width > 1 && (rect.left < -1 || rect.right > width + 1));
    if (out && !boxed(element)) found.push(text.data.trim().slice(0, 60));
  }
  return found;
}"""


async def unreadable(page: Page) -> list[str]:
    """Returns what is outside of the window to the left or right, in words; empty = the page fits."""
    found: Any = await page.evaluate(_OUTSIDE)
    return [str(one) for one in found]
