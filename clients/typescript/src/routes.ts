/** The headers that route a request, as the protos declare them (`penstock.options.v1.route`). */

import { type DescMessage, type DescMethod, getOption, type Message } from "@bufbuild/protobuf";
import { type ReflectMessage, reflect } from "@bufbuild/protobuf/reflect";
import type { Interceptor } from "@connectrpc/connect";
import { route } from "./gen/penstock/options/v1/options_pb.js";

const FITS = /^[ -~]{1,128}$/;

/** The headers of a request; of a stream, the first message decides. */
export function routingHeaders(method: DescMethod, message: Message): Map<string, string> {
  const found = new Map<string, string>();
  for (const { header, field } of getOption(method, route)) {
    const values = new Set(valuesOf(reflect(method.input as DescMessage, message), field.split(".")));
    values.delete("");
    const [value] = values;
    if (!found.has(header) && values.size === 1 && value !== undefined && FITS.test(value)) {
      found.set(header, value);
    }
  }
  return found;
}

/** Sends them with every call. */
export const routing: Interceptor = (next) => async (request) => {
  if (getOption(request.method, route).length === 0) {
    return next(request);
  }
  if (!request.stream) {
    set(request.header, routingHeaders(request.method, request.message));
    return next(request);
  }
  const messages = request.message[Symbol.asyncIterator]();
  const first = await messages.next();
  if (!first.done) {
    set(request.header, routingHeaders(request.method, first.value));
  }
  async function* all() {
    try {
      for (let step = first; !step.done; step = await messages.next()) {
        yield step.value;
      }
    } finally {
      await messages.return?.();
    }
  }
  return next({ ...request, message: all() });
};

function set(into: Headers, headers: Map<string, string>): void {
  for (const [name, value] of headers) {
    into.set(name, value);
  }
}

function* valuesOf(message: ReflectMessage, [name, ...rest]: string[]): Generator<string> {
  const field = message.fields.find((one) => one.name === name);
  if (field === undefined || !message.isSet(field)) {
    return;
  }
  const value: unknown = message.get(field);
  for (const item of field.fieldKind === "list" ? (value as Iterable<unknown>) : [value]) {
    if (rest.length > 0) {
      yield* valuesOf(item as ReflectMessage, rest);
    } else {
      yield String(item);
    }
  }
}
