import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { InvalidArgument, VERSION } from "../index.js";
import { tensorFile } from "../weights/safetensors.js";

test("tensors are laid out as one safetensors file", () => {
  const large = new Uint8Array(1024 * 1024 + 3);
  const file = tensorFile({
    a: { shape: [2], data: Float32Array.of(1, -2) },
    b: { shape: [large.length], dtype: "U8", data: large },
    none: { shape: [0], dtype: "I8", data: new Uint8Array() },
  });
  const chunks = [...file.chunks()];
  const whole = Buffer.concat(chunks);
  assert.ok(chunks.every(({ length }) => length <= 1024 * 1024));
  assert.equal(BigInt(whole.length), file.sizeBytes);
  assert.deepEqual(createHash("sha256").update(whole).digest(), Buffer.from(file.sha256));
  const length = Number(whole.readBigUInt64LE());
  assert.equal(length % 8, 0);
  const header = JSON.parse(whole.toString("utf-8", 8, 8 + length));
  assert.deepEqual(header.a, { dtype: "F32", shape: [2], data_offsets: [0, 8] });
  assert.deepEqual(header.none.data_offsets, [large.length + 8, large.length + 8]);
  assert.deepEqual([whole.readFloatLE(8 + length), whole.readFloatLE(12 + length)], [1, -2]);
});

test("tensors that cannot be pushed are named", () => {
  const refused = (reason: string) => (error: unknown) => error instanceof InvalidArgument && error.reason === reason;
  assert.throws(() => tensorFile({}), refused("NO_TENSORS"));
  assert.throws(() => tensorFile({ a: { shape: [], dtype: "C64" as "U8", data: new Uint8Array(8) } }), refused("TENSOR_DTYPE"));
  assert.throws(() => tensorFile({ a: { shape: [2], data: Float32Array.of(1) } }), refused("TENSOR_SIZE"));
});

test("the version that calls name is the package's", () => {
  const { version } = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf-8"));
  assert.equal(VERSION, version);
});
