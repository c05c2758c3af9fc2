import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { background, BOUNDS, linear, luminance, stepLabel, stepOf, STEPS } from "./scale";
import { segments, type Sought } from "./segments";
import { chunks, figures, float32, int32, nextSurprise, quotedToken, rangeOf, runs, type Span, span, tokenAt, versionAt } from "./tokens";
import { Vocabulary, VocabularyError } from "./vocabulary";

const TEXTS = fc.array(fc.constantFrom("a", "b\n", " word", "\n", "", "\u202e", "<|end|>", "é"), { maxLength: 400 });
const SPANS = TEXTS.chain((texts) =>
  fc.array(fc.double({ min: -20, max: 0, noNaN: true }), { minLength: texts.length, maxLength: texts.length }).map(
    (logprobs): Span => ({
      ids: Int32Array.from(texts, (_, index) => index),
      logprobs: Float32Array.from(logprobs),
      versions: [{ version: 4n, start: 0, end: Math.floor(texts.length / 2) }],
      texts,
      special: texts.map((text) => text === "<|end|>"),
      untrained: "",
    }),
  ),
);

describe("coloured runs of tokens", () => {
  test("runs are a partition of the tokens, in order", () => {
    fc.assert(
      fc.property(SPANS, fc.constantFrom("logprob", "version", "none"), (of, colouring) => {
        const made = chunks(of, colouring).flatMap((chunk) => chunk.runs);
        let at = 0;
        for (const run of made) {
          expect(run.start).toBe(at);
          expect(run.end).toBeGreaterThan(run.start);
          at = run.end;
        }
        expect(at).toBe(of.ids.length);
      }),
    );
  });

  test("neighbours differ in look, unless a chunk ends between them", () => {
    fc.assert(
      fc.property(SPANS, (of) => {
        for (const chunk of chunks(of, "logprob")) {
          chunk.runs.forEach((run, index) => expect(run.classes).not.toBe(chunk.runs[index + 1]?.classes));
        }
      }),
    );
  });

  test("every character of a run belongs to the token that it came of", () => {
    fc.assert(
      fc.property(SPANS, (of) => {
        for (const run of runs(of, "none", 0, of.ids.length)) {
          for (let index = run.start; index < run.end; index += 1) {
            const [from, to] = rangeOf(of, run, index);
            for (let offset = from; offset < to; offset += 1) expect(tokenAt(of, run, offset)).toBe(index);
          }
        }
      }),
    );
  });

  test("thirty thousand tokens of a model that is mostly sure are a few thousand runs", () => {
    const count = 30_000;
    const of = span(new Int32Array(count), Float32Array.from({ length: count }, (_, index) => (index % 25 === 0 ? -2 : -0.001)), [], undefined, "");
    const made = chunks(of, "logprob").flatMap((chunk) => chunk.runs);
    expect(made.length).toBeLessThan(3_000);
  });

  test("numbers are read little-endian from bytes that are aligned to nothing", () => {
    const bytes = new Uint8Array([9, 1, 0, 0, 0, 255, 255, 255, 255]).subarray(1);
    expect([...int32(bytes)]).toEqual([1, -1]);
    expect([...float32(Uint8Array.of(0, 0, 128, 191))]).toEqual([-1]);
  });

  test("logprobs that are not as many as the tokens are left out", () => {
    expect(span(Int32Array.of(1, 2), Float32Array.of(-1), [], undefined, "").logprobs).toBeUndefined();
  });

  test("surprises are gone to in both directions", () => {
    const of = span(new Int32Array(4), Float32Array.of(-0.1, -2, -0.1, -3), [], undefined, "");
    expect([nextSurprise(of, 0, 1), nextSurprise(of, 1, 1), nextSurprise(of, 3, 1), nextSurprise(of, 3, -1)]).toEqual([1, 3, -1, 1]);
  });

  test("a token is described on one line, and a part of a character as what it is", () => {
    expect(quotedToken(" a\n")).toBe("“␣a⏎”");
    expect(quotedToken("")).toBe("part of a character");
  });

  test("figures over no tokens are none", () => {
    expect(figures(undefined)).toBeUndefined();
    expect(figures(Float32Array.of(-1, -3))).toEqual({ mean: -2, least: -3, perplexity: Math.exp(2) });
  });

  test("a version is told of the tokens that it sampled", () => {
    expect(versionAt([{ version: 3n, start: 0, end: 2 }], 1)).toBe(3n);
    expect(versionAt([{ version: 3n, start: 0, end: 2 }], 2)).toBeUndefined();
  });
});

describe("the scale of probabilities", () => {
  const TEXT = { light: { l: 0.22, c: 0.015, h: 257 }, dark: { l: 0.935, c: 0.005, h: 250 } } as const;

  test("text stands out from every step by 4.5 to 1, in both themes", () => {
    for (const theme of ["light", "dark"] as const) {
      for (let step = 1; step < STEPS; step += 1) {
        const both = [luminance(background(step, theme)), luminance(TEXT[theme])];
        const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        expect(contrast, `${theme} ${step}`).toBeGreaterThanOrEqual(4.5);
      }
    }
  });

  test("steps are told apart by lightness alone, for those who see no red or no green", () => {
    for (const theme of ["light", "dark"] as const) {
      for (let step = 1; step < STEPS - 1; step += 1) {
        const [here, next] = [background(step, theme), background(step + 1, theme)];
        expect(Math.abs(here.l - next.l)).toBeGreaterThan(0.025);
        expect(linear(here).every((part) => part >= 0 && part <= 1)).toBe(true);
      }
    }
  });

  test("a less likely token never has a lower step, and every step is reached", () => {
    const steps = [0, ...BOUNDS.map((bound) => -bound - 0.001)].map(stepOf);
    expect(steps).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8]);
    expect(stepOf(Number.NEGATIVE_INFINITY)).toBe(8);
    expect(stepOf(Number.NaN)).toBe(0);
    expect([0, 4, 8].map(stepLabel)).toEqual(["99 % or more", "30 % to 50 %", "under 0.1 %"]);
  });
});

describe("what tokens spell", () => {
  const PARTS: readonly Sought[] = [
    { kind: "reasoning", text: "I look." },
    { kind: "text", text: "Reading it." },
    { kind: "tool_call", text: '{"command": "ls"}', name: "bash" },
  ];
  const TEXT = '<think>\nI look.\n</think>\n\nReading it.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>';

  test("reasoning, text and tool calls are found without knowing the model's markup", () => {
    const letters = [...TEXT];
    const found = segments(letters, PARTS).map(({ kind, start, end }) => [kind, letters.slice(start, end).join("")]);
    expect(found).toEqual([
      ["reasoning", "<think>\nI look.\n</think>\n\n"],
      ["text", "Reading it.\n"],
      ["tool_call", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'],
    ]);
  });

  test("segments are a partition of the tokens, whatever the message says", () => {
    const kinds = fc.constantFrom<Sought["kind"]>("reasoning", "text", "tool_call");
    const parts = fc.array(fc.record({ kind: kinds, text: fc.constantFrom("a", "b\n", " word a", "zzz", ""), name: fc.constantFrom("a", "", "zz") }), { maxLength: 5 });
    fc.assert(
      fc.property(TEXTS, parts, (texts, sought) => {
        let at = 0;
        for (const segment of segments(texts, sought)) {
          expect(segment.start).toBe(at);
          expect(segment.end).toBeGreaterThan(at);
          at = segment.end;
        }
        expect(at).toBe(texts.length);
      }),
    );
  });

  test("a message that is not in the tokens leaves them one text", () => {
    expect(segments(["a", "b"], [{ kind: "text", text: "other" }])).toEqual([{ kind: "text", start: 0, end: 2, part: -1 }]);
  });
});

describe("vocabularies", () => {
  const byteLevel = JSON.stringify({
    model: { vocab: { "\u0120hi": 0, "\u00c3": 1, "\u00a9": 2, "\u010a": 3 } },
    added_tokens: [{ id: 9, content: "<|end|>" }],
    decoder: { type: "Sequence", decoders: [{ type: "ByteLevel" }] },
  });

  test("byte-level pieces are the bytes that they stand for, a split character standing at its last token", () => {
    expect(Vocabulary.parse(byteLevel).texts(Int32Array.of(0, 1, 2, 3, 9, 77))).toEqual({
      texts: [" hi", "", "é", "\n", "<|end|>", "⟨77⟩"],
      special: [false, false, false, false, true, false],
    });
  });

  test("half a character that nothing completes is not lost", () => {
    expect(Vocabulary.parse(byteLevel).texts(Int32Array.of(1)).texts).toEqual(["\ufffd"]);
    expect(Vocabulary.parse(byteLevel).texts(Int32Array.of(1, 9)).texts).toEqual(["", "\ufffd<|end|>"]);
  });

  test("metaspaces are spaces and byte fallbacks bytes", () => {
    const json = JSON.stringify({ model: { vocab: [["\u2581hi", -1], ["<0x0A>", -2]] }, decoder: { type: "Metaspace" } });
    expect(Vocabulary.parse(json).texts(Int32Array.of(0, 1)).texts).toEqual([" hi", "\n"]);
  });

  test("whatever an engine sends as tokenizer.json is read or refused in words", () => {
    for (const json of ["", "null", "[]", "{}", '{"model": {"vocab": 3}}']) expect(() => Vocabulary.parse(json)).toThrow(VocabularyError);
    const odd = { "": { toString: "" } };
    expect(Vocabulary.parse(JSON.stringify({ model: { vocab: odd }, added_tokens: [{ id: odd, content: "x" }] }))).toBeInstanceOf(Vocabulary);
    expect(Vocabulary.parse(JSON.stringify({ model: { vocab: [[odd, -1]] } }))).toBeInstanceOf(Vocabulary);
    fc.assert(
      fc.property(fc.jsonValue(), (value) => {
        try {
          Vocabulary.parse(JSON.stringify({ model: { vocab: value }, added_tokens: value, decoder: value }));
        } catch (error) {
          expect(error).toBeInstanceOf(VocabularyError);
        }
      }),
    );
  });
});
