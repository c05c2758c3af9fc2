/**
 * The client's one family of errors.
 *
 * Every error that the client raises on purpose is a {@link PenstockError}. `reason` is the stable UPPER_SNAKE name that a program
 * may compare; the text is for people and says what to do where that is known. What a caller's own `AbortSignal` ends
 * rejects with that signal's reason, as `fetch` does.
 */

/** One field of a request that is invalid: its path from the root of the request, and what is wrong with it. */
export interface Violation {
  readonly field: string;
  readonly description: string;
}

export interface ErrorFacts {
  /** Stable, in UPPER_SNAKE; `TRANSPORT_<CODE>` when the transport failed and no service spoke. */
  readonly reason: string;
  /** Small facts that the service added. */
  readonly metadata?: Readonly<Record<string, string>>;
  readonly violations?: readonly Violation[];
  /** After how many milliseconds a retry may help; absent when that is not known. */
  readonly retryAfterMs?: number | undefined;
  readonly cause?: unknown;
}

/** Base of all errors of the client. */
export class PenstockError extends Error {
  readonly reason: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly violations: readonly Violation[];
  readonly retryAfterMs: number | undefined;

  constructor(message: string, facts: ErrorFacts) {
    const fields = (facts.violations ?? []).map((item) => `${item.field}: ${item.description}`).join("; ");
    super(
      fields && !message.includes(fields) ? `${message} (${fields})` : message,
      facts.cause === undefined ? undefined : { cause: facts.cause },
    );
    this.name = new.target.name;
    this.reason = facts.reason;
    this.metadata = facts.metadata ?? {};
    this.violations = facts.violations ?? [];
    this.retryAfterMs = facts.retryAfterMs;
  }
}

/** The request is wrong whatever the state; `violations` name the fields. */
export class InvalidArgument extends PenstockError {}
/** No token was sent, or one that the service does not know. */
export class Unauthenticated extends PenstockError {}
/** The token's role may not do this. */
export class PermissionDenied extends PenstockError {}
/** There is no such thing. */
export class NotFound extends PenstockError {}
/** The id is taken by something with other content. */
export class AlreadyExists extends PenstockError {}
/** Not possible in the present state; repeating the call alone will not help. */
export class FailedPrecondition extends PenstockError {}
/** A concurrent change came first. */
export class Aborted extends PenstockError {}
/** The service says that the call was cancelled. A call that was dropped without a word is `Unavailable`. */
export class Cancelled extends PenstockError {}
/** A limit is reached; `retryAfterMs` says when to try again where that helps. */
export class ResourceExhausted extends PenstockError {}
/** The service cannot be reached or cannot answer now. */
export class Unavailable extends PenstockError {}
/** The time allowed for the call is over. */
export class DeadlineExceeded extends PenstockError {}
/** The service or its backend cannot do it at all. */
export class Unsupported extends PenstockError {}
/** Data arrived damaged. */
export class DataLoss extends PenstockError {}
/** A fault of the service; its log has the details. */
export class Internal extends PenstockError {}
/** The client itself is set up wrongly: an address, a token, a file. */
export class ConfigurationError extends PenstockError {}
/** Some of several engines did not do what all were asked. Repeat it: those that have done it do nothing. */
export class EnginesFailed extends PenstockError {
  /** Each one's error, by the engine's name. */
  readonly failures: Readonly<Record<string, PenstockError>>;
  /** The policy version of the base weights that each engine has now; undefined = it does not answer. */
  readonly inForce: Readonly<Record<string, number | undefined>>;

  constructor(failures: Readonly<Record<string, PenstockError>>, inForce: Readonly<Record<string, number | undefined>>) {
    const failed = Object.entries(failures).map(([name, { reason, message }]) => `${name}: ${reason}: ${message}`);
    const have = Object.entries(inForce).map(([name, has]) => `${name} ${has ?? "?"}`);
    super(
      `${failed.length} of ${have.length} engines failed (${failed.join("; ")}). Policy versions in force: ${have.join(", ")}`,
      { reason: "ENGINES_FAILED" },
    );
    this.failures = failures;
    this.inForce = inForce;
  }
}
/** A session at the gate ended and could not be taken up again. */
export class SessionLost extends PenstockError {}

/** Whether a stream ended that can be taken up where it was: the service went away, or the stream was not read. */
export function isBroken(error: unknown): error is PenstockError {
  return error instanceof Unavailable || (error instanceof ResourceExhausted && error.reason === "READER_TOO_SLOW");
}

/** The gate did not take a result; the subclass says why. */
export class ResultRejected extends PenstockError {
  /** Whether the call is still leased, so that another result may be given. */
  get retryable(): boolean {
    return false;
  }
}

/** The session has no such call. */
export class UnknownCall extends ResultRejected {}
/** Another result came first. */
export class AlreadyDelivered extends ResultRejected {}
/** The call was cancelled or expired, or its rollout is closed. */
export class CallEnded extends ResultRejected {}
/** The call is leased to another session now. */
export class NotLeased extends ResultRejected {}
/** The completion breaks a rule, which `violations` names. */
export class InvalidCompletion extends ResultRejected {
  override get retryable(): boolean {
    return true;
  }
}
/** The completion was sampled by weights that the rollout does not accept. */
export class StalePolicy extends ResultRejected {
  override get retryable(): boolean {
    return true;
  }
}
