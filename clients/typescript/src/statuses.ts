/** The one table from gRPC statuses to the client's errors. */

import { Code, ConnectError } from "@connectrpc/connect";
import {
  Aborted,
  AlreadyExists,
  Cancelled,
  DataLoss,
  DeadlineExceeded,
  type ErrorFacts,
  FailedPrecondition,
  Internal,
  InvalidArgument,
  NotFound,
  type PenstockError,
  PermissionDenied,
  ResourceExhausted,
  Unauthenticated,
  Unavailable,
  Unsupported,
} from "./errors.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

/** A token as messages name it; never its text. */
export interface SentToken {
  readonly origin: string;
  advice(): string;
}

type ErrorClass = new (message: string, facts: ErrorFacts) => PenstockError;

const CLASSES: ReadonlyMap<Code, ErrorClass> = new Map<Code, ErrorClass>([
  [Code.InvalidArgument, InvalidArgument],
  [Code.OutOfRange, InvalidArgument],
  [Code.Unauthenticated, Unauthenticated],
  [Code.PermissionDenied, PermissionDenied],
  [Code.NotFound, NotFound],
  [Code.AlreadyExists, AlreadyExists],
  [Code.FailedPrecondition, FailedPrecondition],
  [Code.Aborted, Aborted],
  [Code.Canceled, Cancelled],
  [Code.ResourceExhausted, ResourceExhausted],
  [Code.Unavailable, Unavailable],
  [Code.DeadlineExceeded, DeadlineExceeded],
  [Code.Unimplemented, Unsupported],
  [Code.DataLoss, DataLoss],
  [Code.Internal, Internal],
  [Code.Unknown, Internal],
]);

/** The error of a status that travels in a message: of one item, where the call has others. */
export function ofCode(code: number, message: string, facts: ErrorFacts): PenstockError {
  return new (CLASSES.get(code) ?? Internal)(message, facts);
}

/**
 * The error that a failed call stands for.
 *
 * @param thrown what the transport threw.
 * @param peer who was called, for people: `the driver service at 127.0.0.1:7702`.
 * @param token what was sent there: where it was found, and what to do where the service does not take it.
 */
export function fromTransport(thrown: unknown, peer: string, token?: SentToken): unknown {
  if (!(thrown instanceof ConnectError)) {
    return thrown;
  }
  if (!spoke(thrown)) {
    return new Unavailable(
      `Cannot reach ${peer}. Is it running? \`penstock up\` starts all services. (${thrown.rawMessage})`,
      { reason: "TRANSPORT_UNAVAILABLE", cause: thrown },
    );
  }
  if (thrown.code === Code.Canceled && thrown.findDetails(ErrorInfoSchema).length === 0) {
    // Not by us: it was the server's core, which drops calls under a flood.
    return new Unavailable(
      `${peer.charAt(0).toUpperCase()}${peer.slice(1)} dropped the call before it was answered: it is overloaded or shutting down. ` +
        `Try again; if it continues, check which programs connect to it. (${thrown.rawMessage})`,
      { reason: "TRANSPORT_CANCELLED", cause: thrown },
    );
  }
  const code = UPPER_SNAKE.get(thrown.code) ?? "UNKNOWN";
  const [info] = thrown.findDetails(ErrorInfoSchema);
  const [bad] = thrown.findDetails(BadRequestSchema);
  const [retry] = thrown.findDetails(RetryInfoSchema);
  const delay = retry?.retryDelay;
  let message = thrown.rawMessage || `The call to ${peer} failed with ${code}.`;
  if (info === undefined && thrown.code === Code.Unimplemented) {
    message = `This is not implemented by ${peer}: ${message}`;
  } else if (token !== undefined && thrown.code === Code.Unauthenticated) {
    message = `${message.replace(/\.$/, "")}, says ${peer}. ${token.advice()}`;
  } else if (token !== undefined && info?.reason === "ROLE_NOT_ALLOWED") {
    message = `${message} The token that was sent is from ${token.origin}.`;
  }
  return new (CLASSES.get(thrown.code) ?? Internal)(message, {
    reason: info?.reason ?? `TRANSPORT_${code}`,
    metadata: info?.metadata ?? {},
    violations: (bad?.fieldViolations ?? []).map(({ field, description }) => ({ field, description })),
    retryAfterMs: delay === undefined ? undefined : Math.max(0, Number(delay.seconds) * 1000 + delay.nanos / 1e6),
    cause: thrown,
  });
}

/** Whether a status came over the wire, or the deadline that was set here passed; else the connection failed. */
function spoke(error: ConnectError): boolean {
  if (error.isWireError || /^HTTP \d/.test(error.rawMessage)) {
    return true;
  }
  // What this side refuses before it sends, or because an answer is too large.
  const ours = [Code.DeadlineExceeded, Code.ResourceExhausted, Code.Unimplemented];
  return ours.includes(error.code) || (error.code === Code.InvalidArgument && !error.rawMessage.startsWith("protocol"));
}

const UPPER_SNAKE: ReadonlyMap<Code, string> = new Map(
  Object.entries(Code)
    .filter((entry): entry is [string, Code] => typeof entry[1] === "number")
    .map(([name, code]) => [
      code,
      name === "Canceled" ? "CANCELLED" : name.replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase(),
    ]),
);
