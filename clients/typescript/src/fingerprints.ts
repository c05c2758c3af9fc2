/**
 * A message as bytes that are the same in every language: what is hashed where clients of several languages compare. Protobuf's own
 * form is not: fields and maps may come in any order.
 */

import { type DescMessage, type Message, ScalarType } from "@bufbuild/protobuf";
import { type ReflectMessage, reflect, type ScalarValue } from "@bufbuild/protobuf/reflect";

/**
 * The set fields by their numbers, each as `NUMBER:LENGTH:VALUE`, one for each item of a list. A text is its UTF-8, an integer, a truth
 * value and an enum's number its decimal form, a real number its eight bytes, the highest first, a message its fingerprint. An entry
 * of a map is a message of its key (1) and its value (2), both always there; entries are in the order of their bytes.
 */
export function fingerprint<Desc extends DescMessage>(schema: Desc, message: Message): Buffer {
  return fingerprintOf(reflect(schema, message as never));
}

function fingerprintOf(message: ReflectMessage): Buffer {
  const items: Buffer[] = [];
  for (const field of message.sortedFields) {
    if (!message.isSet(field)) {
      continue;
    }
    switch (field.fieldKind) {
      case "scalar":
        items.push(item(field.number, scalar(field.scalar, message.get(field))));
        break;
      case "enum":
        items.push(item(field.number, text(String(message.get(field)))));
        break;
      case "message":
        items.push(item(field.number, fingerprintOf(message.get(field))));
        break;
      case "list":
        for (const one of message.get(field)) {
          items.push(item(field.number, value(field.listKind === "scalar" ? field.scalar : undefined, one)));
        }
        break;
      case "map": {
        const entries: Buffer[] = [];
        for (const [key, one] of message.get(field)) {
          const of = field.mapKind === "scalar" ? field.scalar : undefined;
          const entry = Buffer.concat([item(1, keyed(key)), item(2, value(of, one))]);
          entries.push(item(field.number, entry));
        }
        items.push(...entries.sort(Buffer.compare));
      }
    }
  }
  return Buffer.concat(items);
}

/** Of a list or a map; without a scalar type it is a message, or an enum's number. */
function value(of: ScalarType | undefined, given: unknown): Buffer {
  if (of !== undefined) {
    return scalar(of, given as ScalarValue);
  }
  return typeof given === "number" ? text(String(given)) : fingerprintOf(given as ReflectMessage);
}

function keyed(key: unknown): Buffer {
  return text(typeof key === "boolean" ? String(Number(key)) : String(key));
}

function scalar(of: ScalarType, given: ScalarValue): Buffer {
  if (given instanceof Uint8Array) {
    return Buffer.from(given);
  }
  if (of === ScalarType.DOUBLE || of === ScalarType.FLOAT) {
    const made = Buffer.alloc(8);
    made.writeDoubleBE(given as number);
    return made;
  }
  return text(typeof given === "boolean" ? String(Number(given)) : String(given));
}

function item(number: number, content: Buffer): Buffer {
  return Buffer.concat([text(`${number}:${content.length}:`), content]);
}

function text(given: string): Buffer {
  return Buffer.from(given, "utf8");
}
