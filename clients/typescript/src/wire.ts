/** Numbers, times and words to and from protos. Enums are lower-case words here and `PREFIX_WORD` there. */

import type { DescEnum, EnumShape } from "@bufbuild/protobuf";
import type { Duration, Timestamp } from "@bufbuild/protobuf/wkt";
import { InvalidArgument } from "./errors.js";

const LITTLE_ENDIAN = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

/** Token ids from their wire form: a view of it where it lies as it must, else a copy. */
export function tokenIds(data: Uint8Array): Int32Array {
  const bytes = aligned(data);
  return new Int32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength >> 2);
}

/** Logprobs from their wire form. */
export function logprobs(data: Uint8Array): Float32Array {
  const bytes = aligned(data);
  return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength >> 2);
}

/** Four-byte numbers in their wire form. */
export function bytesOf(values: Int32Array | Float32Array): Uint8Array {
  return aligned(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
}

function aligned(data: Uint8Array): Uint8Array {
  if (LITTLE_ENDIAN) {
    return data.byteOffset % 4 === 0 ? data : data.slice();
  }
  const swapped = data.slice();
  for (let start = 0; start + 3 < swapped.length; start += 4) {
    swapped.subarray(start, start + 4).reverse();
  }
  return swapped;
}

/** Milliseconds as a Duration; absent stays unset. */
export function duration(milliseconds: number | undefined): { seconds: bigint; nanos: number } | undefined {
  if (milliseconds === undefined) {
    return undefined;
  }
  const seconds = Math.floor(milliseconds / 1000);
  return { seconds: BigInt(seconds), nanos: Math.round((milliseconds - seconds * 1000) * 1e6) };
}

/** A Duration in milliseconds. */
export function milliseconds(message: Duration | undefined): number | undefined {
  return message === undefined ? undefined : Number(message.seconds) * 1000 + message.nanos / 1e6;
}

/** A Timestamp as a Date. */
export function time(message: Timestamp | undefined): Date | undefined {
  return message === undefined ? undefined : new Date(Number(message.seconds) * 1000 + message.nanos / 1e6);
}

/** The lower-case word of an enum's value; the number itself when this client does not know it. */
export function word(description: DescEnum, value: number): string {
  const { sharedPrefix = "" } = description;
  return description.value[value]?.name.slice(sharedPrefix.length).toLowerCase() ?? String(value);
}

/** The enum's value for a word. Throws InvalidArgument: lists those that there are. */
export function number<D extends DescEnum>(description: D, given: string): EnumShape<D> {
  const { sharedPrefix = "" } = description;
  const name = sharedPrefix.toUpperCase() + given.toUpperCase();
  const found = description.values.find((item) => item.name === name);
  if (found === undefined) {
    const words = description.values.filter((item) => item.number > 0).map((item) => word(description, item.number));
    throw new InvalidArgument(`'${given}' is not one of ${words.join(", ")}`, { reason: "ENUM_VALUE" });
  }
  return found.number as EnumShape<D>;
}
