/**
 * The text of token ids, read from a tokenizer.json without the library that made it: for people to look at.
 *
 * Exact for byte-level vocabularies and for those with metaspaces and byte fallback, which language models have; of others
 * the vocabulary's own notation is shown. What a tokenizer.json says is data of an engine: nothing of it is executed, and
 * one that cannot be read is an error in words.
 */

const METASPACE = /\u2581/gu;
const BYTE_PIECE = /^<0x([0-9A-Fa-f]{2})>$/u;

/** Tokens as they read in a row. */
export interface Texts {
  /** The text of each token; a character that several tokens make up stands at the last of them. */
  readonly texts: readonly string[];
  /** Whether a token is one of those that no text can spell, such as the end of a turn. */
  readonly special: readonly boolean[];
}

/** A vocabulary that cannot be read; the message is for people. */
export class VocabularyError extends Error {
  override readonly name = "VocabularyError";
}

export class Vocabulary {
  private constructor(
    private readonly pieces: ReadonlyMap<number, string>,
    private readonly added: ReadonlyMap<number, string>,
    private readonly isByteLevel: boolean,
  ) {}

  /** @throws VocabularyError: it is no tokenizer.json. */
  static parse(json: string): Vocabulary {
    let whole: unknown;
    try {
      whole = JSON.parse(json);
    } catch {
      throw new VocabularyError("the engine's tokenizer.json is no JSON");
    }
    const vocabulary = member(member(whole, "model"), "vocab");
    const pieces = new Map<number, string>();
    if (Array.isArray(vocabulary)) {
      // Unigram: pieces with their scores, in order.
      vocabulary.forEach((entry: unknown, index) => pieces.set(index, Array.isArray(entry) && typeof entry[0] === "string" ? entry[0] : ""));
    } else if (typeof vocabulary === "object" && vocabulary !== null) {
      for (const [piece, index] of Object.entries(vocabulary)) if (typeof index === "number") pieces.set(index, piece);
    } else {
      throw new VocabularyError("the engine's tokenizer.json has no vocabulary");
    }
    const added = new Map<number, string>();
    const extra = member(whole, "added_tokens");
    for (const token of Array.isArray(extra) ? (extra as unknown[]) : []) {
      const content = member(token, "content");
      const id = member(token, "id");
      if (typeof content === "string" && typeof id === "number") added.set(id, content);
    }
    return new Vocabulary(pieces, added, steps(member(whole, "decoder")).includes("ByteLevel"));
  }

  get size(): number {
    return this.pieces.size;
  }

  /** The texts of a row of tokens; an id that the vocabulary does not have reads as its number between marks. */
  texts(ids: Int32Array): Texts {
    const texts: string[] = [];
    const special: boolean[] = [];
    // Half a character waits in the decoder for the token that completes it.
    let decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    for (const id of ids) {
      const added = this.added.get(id);
      special.push(added !== undefined);
      const bytes = added === undefined ? this.bytesOf(id) : added;
      if (typeof bytes !== "string") {
        texts.push(decoder.decode(bytes, { stream: true }));
        continue;
      }
      const broken = decoder.decode();
      decoder = new TextDecoder("utf-8", { ignoreBOM: true });
      texts.push(broken + bytes);
    }
    const broken = decoder.decode();
    if (broken !== "" && texts.length > 0) texts[texts.length - 1] += broken;
    return { texts, special };
  }

  private bytesOf(id: number): Uint8Array | string {
    const piece = this.pieces.get(id);
    if (piece === undefined) return `⟨${id}⟩`;
    if (!this.isByteLevel) {
      const byte = BYTE_PIECE.exec(piece);
      return byte ? Uint8Array.of(Number.parseInt(byte[1] ?? "0", 16)) : piece.replace(METASPACE, " ");
    }
    const bytes = new Uint8Array(piece.length);
    let length = 0;
    for (const letter of piece) {
      const byte = LETTERS.get(letter);
      if (byte === undefined) return piece;
      bytes[length] = byte;
      length += 1;
    }
    return bytes.subarray(0, length);
  }
}

function member(value: unknown, name: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[name] : undefined;
}

function steps(decoder: unknown): unknown[] {
  const inner = member(decoder, "decoders");
  return [member(decoder, "type"), ...(Array.isArray(inner) ? inner.flatMap(steps) : [])];
}

/** Byte-level vocabularies write a printable byte as itself, the n-th other one as the character 256 + n. */
const LETTERS: ReadonlyMap<string, number> = (() => {
  const letters = new Map<string, number>();
  let hidden = 0;
  for (let byte = 0; byte < 256; byte += 1) {
    const isPrintable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    letters.set(String.fromCodePoint(isPrintable ? byte : 256 + hidden), byte);
    if (!isPrintable) hidden += 1;
  }
  return letters;
})();
