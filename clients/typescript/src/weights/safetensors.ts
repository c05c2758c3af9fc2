/**
 * Tensors as one safetensors file, in memory: 8 bytes little-endian length of the header, the header (JSON, padded with spaces
 * to a multiple of 8), then the tensors' bytes back to back.
 */

import { createHash } from "node:crypto";
import { InvalidArgument } from "../errors.js";

/** The protocol's largest chunk of a push. */
const CHUNK_BYTES = 1024 * 1024;

const DTYPE_BYTES = { F64: 8, F32: 4, F16: 2, BF16: 2, I64: 8, I32: 4, I16: 2, I8: 1, U8: 1, BOOL: 1 } as const;

/** A tensor as safetensors has it: values little-endian, in row-major order. A `Float32Array` is `F32`. */
export type Tensor = {
  readonly shape: readonly number[];
} & (
  | { readonly data: Float32Array; readonly dtype?: "F32" }
  | { readonly data: Uint8Array; readonly dtype: keyof typeof DTYPE_BYTES }
);

/** By name, as in the model's safetensors file. Data is not copied: leave it as it is until the push has ended. */
export type Tensors = Readonly<Record<string, Tensor>>;

/** A file: its size, its digest, and its content in chunks. */
export interface TensorFile {
  readonly sizeBytes: bigint;
  readonly sha256: Uint8Array;
  chunks(): Generator<Uint8Array, void>;
}

/** Throws InvalidArgument NO_TENSORS, TENSOR_DTYPE, TENSOR_SIZE. */
export function tensorFile(tensors: Tensors): TensorFile {
  const entries: Record<string, object> = {};
  const pieces: Uint8Array[] = [];
  let offset = 0;
  for (const [name, { data, dtype = "F32", shape }] of Object.entries(tensors)) {
    const width: number | undefined = DTYPE_BYTES[dtype];
    if (width === undefined) {
      throw new InvalidArgument(`${name} has dtype ${dtype}, which cannot be pushed`, { reason: "TENSOR_DTYPE" });
    }
    const bytes = shape.reduce((product, length) => product * length, width);
    if (data.byteLength !== bytes) {
      const message = `${name} has ${data.byteLength} bytes; its shape needs ${bytes}`;
      throw new InvalidArgument(message, { reason: "TENSOR_SIZE" });
    }
    entries[name] = { dtype, shape, data_offsets: [offset, offset + bytes] };
    offset += bytes;
    pieces.push(littleEndian(data));
  }
  if (pieces.length === 0) {
    throw new InvalidArgument("There are no tensors to push", { reason: "NO_TENSORS" });
  }
  const text = Buffer.from(JSON.stringify(entries));
  const padded = Buffer.concat([text, Buffer.alloc((8 - (text.length % 8)) % 8, " ")]);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(padded.length));
  pieces.unshift(length, padded);
  const digest = createHash("sha256");
  for (const piece of pieces) {
    digest.update(piece);
  }
  return {
    sizeBytes: BigInt(8 + padded.length + offset),
    sha256: digest.digest(),
    *chunks() {
      let small: Uint8Array[] = [];
      let size = 0;
      for (const piece of pieces) {
        for (let start = 0; start < piece.length; ) {
          const taken = piece.subarray(start, start + CHUNK_BYTES - size);
          start += taken.length;
          size += taken.length;
          small.push(taken);
          if (size === CHUNK_BYTES) {
            yield Buffer.concat(small);
            small = [];
            size = 0;
          }
        }
      }
      if (size > 0) {
        yield Buffer.concat(small);
      }
    },
  };
}

function littleEndian(data: Float32Array | Uint8Array): Uint8Array {
  if (data instanceof Uint8Array || new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) {
    return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  }
  return new Uint8Array(Buffer.from(data.slice().buffer).swap32());
}
