import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { styled } from "./ansi";
import { byteCount, decoded, excerpt, FIRST_CHARACTERS, FIRST_LINES, oneLine, pieces, visible } from "./safe";

const NASTY = fc
  .array(
    fc.oneof(
      fc.string({ unit: "binary" }),
      fc.constantFrom("\u001b[31m", "\u001b[0m", "\u001b[38;5;200m", "\u001b[2J", "\u001b]8;;x\u0007", "\u202e", "\u2066", "\u200b", "\ufeff", "\u{e0041}", "\r\n", "\r", "\u0000", "\ud800", "<script>", "\ufe0f", "\u200d", "\u200c", "\u2800", "\u034f", "❤", "👩", "1", "\u0645"),
    ),
  )
  .map((parts) => parts.join(""));
/** What nothing excuses. */
const CONTROL =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]|[\ud800-\udfff]/u;
/** What may stay where it is needed. */
const JOINER = /[\u200c\u200d\ufe0f]/u;

describe("text that nobody may trust", () => {
  test("nothing that cannot be seen, or that turns text around, is left in what is shown", () => {
    fc.assert(
      fc.property(NASTY, (text) => {
        for (const piece of pieces(text)) expect(piece.text).not.toMatch(CONTROL);
        expect(visible(text)).not.toMatch(CONTROL);
        expect(oneLine(text)).not.toMatch(CONTROL);
      }),
    );
  });

  test("what can be seen is shown once and in order", () => {
    fc.assert(
      fc.property(NASTY, (text) => {
        const shown = pieces(text)
          .filter((piece) => piece.classes !== "mark")
          .map((piece) => piece.text)
          .join("");
        const colourless = styled(text.replaceAll("\r\n", "\n"))
          .map((run) => run.text)
          .join("");
        const seen = (all: string): string => [...all].filter((letter) => !CONTROL.test(letter) && !JOINER.test(letter)).join("");
        expect(seen(shown)).toBe(seen(colourless));
      }),
    );
  });

  test("bidi marks are shown by their code point and name", () => {
    expect(pieces("a\u202egpj.exe")).toEqual([
      { text: "a", classes: "" },
      { text: "U+202E", classes: "mark", title: "U+202E right-to-left override" },
      { text: "gpj.exe", classes: "" },
    ]);
  });

  test("whatever hides text between letters is marked, joiners and variation selectors included", () => {
    const hiding = ["\ufe00", "\ufe0e", "\ufe0f", "\u034f", "\u17b4", "\u180b", "\u180f", "\u200c", "\u200d", "\u2800", "\u{1d173}", "\u{1bca0}", "\u{e0101}", "\ufff0"];
    for (const unseen of hiding) {
      expect(pieces(`a${unseen}b`).map((piece) => piece.classes), unseen.codePointAt(0)?.toString(16)).toEqual(["", "mark", ""]);
      expect(visible(`1${unseen}`)).not.toContain(unseen);
    }
    expect(pieces("a\ufe00b")[1]?.title).toBe("U+FE00 variation selector");
    expect(pieces("a\u{1d173}b")[1]?.title).toBe("U+1D173 invisible character");
  });

  test("what emoji and joined letters need stays, once and where they need it", () => {
    for (const text of ["❤️", "1️⃣", "👩‍🚀", "👩🏽‍🚀", "🏳️‍🌈", "می‌خواهم", "क्‍ष", "ශ්‍රී"]) {
      expect(pieces(text)).toEqual([{ text, classes: "" }]);
      expect(visible(text)).toBe(text);
    }
    const marks = (text: string): number => pieces(text).filter((piece) => piece.classes === "mark").length;
    expect(["❤️\ufe0f", "👩\u200d\u200d🚀", "👩\u200d", "م\u200c\u200cم", "م\u200c", "1\ufe0f2"].map(marks)).toEqual([1, 1, 1, 1, 1, 1]);
  });

  test("what is needed is also found needed where the letters around it are other texts", () => {
    expect(visible("\u200c", "می", "خ")).toBe("\u200c");
    expect(visible("\u200c", "my", "h")).toBe("‹U+200C›");
    expect(visible("x\u200b", "\u200b", "\u200b")).toBe("x‹U+200B›");
  });

  test("many unseen characters of one kind share a mark", () => {
    expect(pieces("\u0000".repeat(1000))).toEqual([{ text: "NUL × 1000", classes: "mark", title: "U+0000 control character" }]);
  });

  test("markup is text", () => {
    expect(pieces("<script>alert(1)</script>")).toEqual([{ text: "<script>alert(1)</script>", classes: "" }]);
  });

  test("of a line of 10 MB a few thousand characters are handed out, and what is hidden is counted", () => {
    const line = "x".repeat(10_000_000);
    const part = excerpt(line, FIRST_CHARACTERS, FIRST_LINES);
    expect(part.text.length).toBe(FIRST_CHARACTERS);
    expect(part.hidden).toBe(10_000_000 - FIRST_CHARACTERS);
    expect(oneLine(line).length).toBeLessThan(130);
  });

  test("an excerpt never ends in half a character, and has as many lines as were asked for at most", () => {
    expect(excerpt("a😀b", 2).text).toBe("a");
    expect(excerpt("1\n2\n3\n4", 100, 2)).toEqual({ text: "1\n2", hidden: 4, whole: 7 });
    fc.assert(
      fc.property(NASTY, fc.nat(40), fc.integer({ min: 1, max: 5 }), (text, most, lines) => {
        const part = excerpt(text, most, lines);
        expect(text.startsWith(part.text)).toBe(true);
        expect(part.text.length + part.hidden).toBe(text.length);
        expect(part.text.length).toBeLessThanOrEqual(most);
        expect(part.text.split("\n").length).toBeLessThanOrEqual(lines);
      }),
    );
  });

  test("bytes that are no UTF-8 are shown as such", () => {
    expect(decoded(Uint8Array.of(0x61, 0xff, 0x62))).toBe("a\ufffdb");
  });

  test("sizes are said in units", () => {
    expect([0, 999, 1000, 1_234_567, 10_000_000].map(byteCount)).toEqual(["0 B", "999 B", "1.0 kB", "1.2 MB", "10 MB"]);
  });
});

describe("terminal colours", () => {
  test("sequences that set them are classes of the text behind them", () => {
    expect(styled("a\u001b[1;31mred\u001b[0m b")).toEqual([
      { text: "a", classes: "" },
      { text: "red", classes: "ansi-red ansi-bold" },
      { text: " b", classes: "" },
    ]);
  });

  test("256 colours and true colours are the nearest of the eight hues", () => {
    expect(styled("\u001b[38;5;196mx")[0]?.classes).toBe("ansi-red");
    expect(styled("\u001b[38;2;0;0;255mx")[0]?.classes).toBe("ansi-blue");
    expect(styled("\u001b[48;2;0;0;0m\u001b[38;2;0;0;0mx")[0]?.classes).toBe("ansi-black");
  });

  test("other escapes stay visible, and nothing is ever lost but the sequences that set colours", () => {
    expect(pieces("\u001b[2Jx").map((piece) => piece.text)).toEqual(["ESC", "[2Jx"]);
    fc.assert(
      fc.property(NASTY, (text) => {
        const kept = styled(text).map((run) => run.text).join("");
        // eslint-disable-next-line no-control-regex
        expect(kept).toBe(text.replace(/\u001b\[[0-9;:]{0,61}m/gu, ""));
      }),
    );
  });

  test("a text that is nothing but escapes is read in linear time", () => {
    const text = "\u001b[".repeat(200_000);
    expect(styled(text)).toEqual([{ text, classes: "" }]);
  });
});
