// What went wrong, in words that say what to do next.
//
// Invariant: nothing that a service says is shown as anything but text.
import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "@gen/google/rpc/error_details_pb";

export interface Violation {
  readonly field: string;
  readonly description: string;
}

export interface Trouble {
  /** One line: what does not work. */
  readonly title: string;
  /** What the service said. */
  readonly said: string;
  /** What to do. */
  readonly todo: string;
  /** Stable UPPER_SNAKE (docs/errors.md); empty where none came. */
  readonly reason: string;
  readonly code: Code;
  /** Waiting does not help: somebody has to do something. */
  readonly lasting: boolean;
  /** By field of the request. */
  readonly violations: readonly Violation[];
  /** Seconds after which the service wants to be asked again. */
  readonly retryAfter: number | null;
}

/** What google.rpc's ErrorInfo, BadRequest and RetryInfo say. */
function details(error: ConnectError): Pick<Trouble, "reason" | "violations" | "retryAfter"> {
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  return {
    reason: error.findDetails(ErrorInfoSchema)[0]?.reason ?? "",
    violations: error
      .findDetails(BadRequestSchema)
      .flatMap((item) => item.fieldViolations.map(({ field, description }) => ({ field, description }))),
    retryAfter: delay ? Number(delay.seconds) + delay.nanos / 1e9 : null,
  };
}

const LASTING = new Set([
  Code.Unauthenticated,
  Code.PermissionDenied,
  Code.Unimplemented,
  Code.NotFound,
  Code.InvalidArgument,
  Code.FailedPrecondition,
  Code.AlreadyExists,
]);

/** Whether this page's own server is gone: browsers throw a TypeError then, each in its own words, and there is no answer to read. */
function isUnreachable(failure: ConnectError): boolean {
  return failure.cause instanceof TypeError && /fetch|network|load failed/i.test(failure.rawMessage);
}

/** Whether it is nothing but that somebody stopped asking. */
export function isCancelled(error: unknown): boolean {
  return ConnectError.from(error).code === Code.Canceled;
}

/**
 * Explains an error of a call.
 *
 * @param what was asked for, as the end of "The dashboard cannot ...": "list the rollouts".
 * @param isRepeated whether it is asked again without anybody doing anything, as what is followed is.
 */
export function explain(error: unknown, what: string, isRepeated = false): Trouble {
  const failure = ConnectError.from(error);
  const { reason, violations, retryAfter } = details(failure);
  if (isUnreachable(failure))
    return {
      ...{ said: "", reason, code: Code.Unavailable, violations, retryAfter, lasting: false },
      title: `The dashboard at ${globalThis.location?.host ?? "its address"} does not answer: cannot ${what}`,
      todo: isRepeated ? "Start it again, or wait: the page retries by itself." : "Start it again, then try again.",
    };
  const base = { said: failure.rawMessage, reason, code: failure.code, violations, retryAfter };
  const lasting = LASTING.has(failure.code);
  switch (failure.code) {
    case Code.Unauthenticated:
      return reason === "CREDENTIAL_MISSING"
        ? { ...base, lasting, title: "No token", todo: "Open the address that penstock up or penstock dashboard printed, or paste a token." }
        : { ...base, lasting, title: "The token is invalid for this service", todo: "Restarted services have new tokens: open the address that penstock up printed last, or paste its token." };
    case Code.PermissionDenied:
      return { ...base, lasting, title: `This token may not ${what}`, todo: "Use a token with another role: docs/interfaces.md lists them." };
    case Code.Unimplemented:
      return { ...base, lasting, title: `The service is too old to ${what}`, todo: "Update the services to the dashboard's version; the rest of the page still works." };
    case Code.Unavailable:
      return { ...base, lasting, title: `No answer: cannot ${what}`, todo: isRepeated ? "Start the service, or wait: the page retries by itself." : "Start the service if it does not run, then try again." };
    case Code.DeadlineExceeded:
      return { ...base, lasting, title: `Too slow: cannot ${what}`, todo: isRepeated ? "The service is busy; the page retries by itself." : "The service is busy, and the request may still take effect: check before you try again." };
    case Code.ResourceExhausted:
      return { ...base, lasting, title: `Too much at once: cannot ${what}`, todo: isRepeated ? "The page retries by itself." : "Try again in a moment." };
    default:
      return { ...base, lasting, title: `Cannot ${what}`, todo: "" };
  }
}
