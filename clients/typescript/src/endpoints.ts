/**
 * Where the services are, and with which token they are called.
 *
 * Looked for in this order: what the caller says; the environment (`PENSTOCK_<SERVICE>_ADDRESS`, `PENSTOCK_TOKEN` or
 * `PENSTOCK_TOKEN_FILE`, `PENSTOCK_CA_FILE`); the connection file that `penstock up` or `penstock credentials` writes; the loopback
 * defaults. A token never travels to an address that it was not given for, and none goes in clear beyond this machine.
 */

import { readFileSync, statSync } from "node:fs";
import { isIP } from "node:net";
import { homedir, hostname } from "node:os";
import { dirname, resolve as resolvePath } from "node:path";
import { env, getuid, kill } from "node:process";
import { ConfigurationError } from "./errors.js";

export const SERVICES = ["sandbox", "driver", "interception", "inference"] as const;
export type ServiceName = (typeof SERVICES)[number];

/** Ports of the gRPC servers when nothing else is said. */
export const DEFAULT_PORTS: Readonly<Record<ServiceName, number>> = {
  sandbox: 7701,
  driver: 7702,
  interception: 7703,
  inference: 7704,
};

/** Certificates, as PEM files: without `caFile` the system's roots are trusted; the other two are the client's own. */
export interface Tls {
  readonly caFile?: string;
  readonly certFile?: string;
  readonly keyFile?: string;
}

/** The settings of `connect`; at most one of `host`, `addresses` and `connectionFile`. */
export interface ConnectOptions {
  /** A host that has all services on their default ports. */
  readonly host?: string;
  /** `host:port` or `unix:PATH`, by service. */
  readonly addresses?: Readonly<Partial<Record<ServiceName, string>>>;
  /** As `penstock up` and `penstock credentials` write it. */
  readonly connectionFile?: string;
  /** Sent with each call; absent = PENSTOCK_TOKEN, PENSTOCK_TOKEN_FILE, or the connection file's. */
  readonly token?: string;
  /** Absent = PENSTOCK_CA_FILE, or the connection file's; without either plaintext, which carries a token to this machine only. */
  readonly tls?: Tls;
  /** In which an operator acts; absent = PENSTOCK_NAMESPACE, or none. A trainer's token belongs to one already. */
  readonly namespace?: string;
  /**
   * Whether the driver is asked which other drivers, gates and sandbox services there are; false = only the addresses given here are
   * used. Absent = PENSTOCK_DISCOVER; true where that is not set either, the driver's address is known, and the connection file does
   * not say false.
   */
  readonly discover?: boolean;
}

/** The addresses of the four services, and how to call them. Empty = there is no such service. */
export interface Endpoints {
  readonly addresses: Readonly<Record<ServiceName, string>>;
  readonly token: string | undefined;
  /** Where the token was found, for people. */
  readonly tokenOrigin: string;
  readonly tls: Tls | undefined;
  /** In which an operator acts; absent = none is named. */
  readonly namespace?: string | undefined;
  /** Whether the driver is asked which other drivers, gates and sandbox services there are. */
  readonly discover: boolean;
}

/** A token to be sent, and where it was found. */
interface FoundToken {
  readonly token: string | undefined;
  readonly origin: string;
}

const GIVEN = "the calling program";

/** Finds the endpoints by the order above. Throws ConfigurationError: says which address, token or file is invalid. */
export function resolve(given: ConnectOptions = {}): Endpoints {
  const namespace = given.namespace ?? (env["PENSTOCK_NAMESPACE"] || undefined);
  if (namespace !== undefined && !/^[a-z0-9][a-z0-9-]{0,62}$/.test(namespace)) {
    throw configuration(`'${namespace}' is not a namespace: 1 to 63 of a-z, 0-9 and -, the first a letter or digit`, "NAMESPACE_INVALID");
  }
  const endpoints = found(given);
  const wanted = given.discover ?? environmentDiscover();
  return { ...endpoints, namespace, discover: endpoints.discover && wanted };
}

/** Throws ConfigurationError DISCOVER. */
function environmentDiscover(): boolean {
  const said = env["PENSTOCK_DISCOVER"] ?? "";
  if (!/^(|0|1|false|true)$/i.test(said)) {
    throw configuration(`PENSTOCK_DISCOVER is '${said}': set it to true or false, or unset it`, "DISCOVER");
  }
  return !/^(0|false)$/i.test(said);
}

function found(given: ConnectOptions): Endpoints {
  const { host, addresses, connectionFile } = given;
  if ([host, addresses, connectionFile].filter((item) => item !== undefined).length > 1) {
    throw configuration("Give one of host, addresses and connectionFile", "TARGET");
  }
  if (connectionFile !== undefined) {
    return readConnection(connectionFile, givenToken(given), given.tls);
  }
  const tls = given.tls ?? (env["PENSTOCK_CA_FILE"] ? { caFile: env["PENSTOCK_CA_FILE"] } : undefined);
  const sent = givenToken(given) ?? environmentToken();
  if (host !== undefined) {
    return checked(ofHost(host), sent, tls);
  }
  const named = addresses ?? ofEnvironment();
  if (named !== undefined) {
    return checked(named, sent, tls);
  }
  const file = usualConnectionFile();
  return isLive(file) ? readConnection(file, sent, given.tls) : checked({}, sent, tls);
}

/** What to do where the services do not take the token, or there is none. */
export function tokenAdvice({ token, tokenOrigin }: Endpoints): string {
  const file = usualConnectionFile();
  if (token === undefined) {
    return (
      "No token was sent: set PENSTOCK_TOKEN to one of theirs, PENSTOCK_TOKEN_FILE to a file with it, or" +
      ` PENSTOCK_CONNECTION to a connection file. (\`penstock up\` writes one while it runs: ${file}.)`
    );
  }
  const [variable] = /^PENSTOCK_TOKEN\w*/.exec(tokenOrigin) ?? [];
  const advice =
    variable === undefined
      ? "the services may have been restarted since"
      : `set it to a token of these services, or unset ${variable} to use that of ${file}.`;
  return `The token that was sent is from ${tokenOrigin}: ${advice}`;
}

/** Endpoints of addresses that were given. Throws ConfigurationError TARGET, TOKEN, TOKEN_IN_CLEAR. */
export function checked(
  given: Readonly<Record<string, string>>,
  { token, origin }: FoundToken,
  tls: Tls | undefined,
): Endpoints {
  // Else nobody named a driver, to which the token may be sent.
  const discover = Object.keys(given).length === 0 || Boolean(given["driver"]);
  const addresses = Object.fromEntries(
    SERVICES.map((service) => [service, `127.0.0.1:${DEFAULT_PORTS[service]}`]),
  ) as Record<ServiceName, string>;
  for (const [service, address] of Object.entries(given)) {
    if (!(SERVICES as readonly string[]).includes(service)) {
      throw configuration(`No such service: ${service}; there are ${SERVICES.join(", ")}`, "TARGET");
    }
    if (address && !isAddress(address)) {
      throw configuration(`The address of ${service} is not host:port: '${address}'`, "TARGET");
    }
    addresses[service as ServiceName] = address;
  }
  if (token !== undefined) {
    if (!/^[!-~](?:[ -~]*[!-~])?$/.test(token)) {
      throw configuration(
        `A token must be printable ASCII, not blank and without whitespace around it; this one is from ${origin}`,
        "TOKEN",
      );
    }
    const far = Object.values(addresses).find((address) => address && !isLocal(address));
    if (tls === undefined && far !== undefined) {
      throw configuration(
        `A token must not be sent in cleartext to ${far}: set tls, or an address on this machine.`,
        "TOKEN_IN_CLEAR",
      );
    }
  }
  return { addresses, token, tokenOrigin: origin, tls, discover };
}

function ofHost(host: string): Record<ServiceName, string> {
  if (!host.trim() || host.includes("/") || (host.split(":").length === 2 && !host.includes("["))) {
    throw configuration(
      `'${host}' is not a host name: pass a host (for the default ports), or addresses of ${SERVICES.join(", ")}`,
      "TARGET",
    );
  }
  const shown = host.includes(":") && !host.startsWith("[") ? `[${host}]` : host;
  const pairs = SERVICES.map((service) => [service, `${shown}:${DEFAULT_PORTS[service]}`]);
  return Object.fromEntries(pairs) as Record<ServiceName, string>;
}

function ofEnvironment(): Record<string, string> | undefined {
  const pairs = SERVICES.map((service) => [service, env[`PENSTOCK_${service.toUpperCase()}_ADDRESS`]] as const);
  const said = pairs.filter((pair): pair is readonly [ServiceName, string] => Boolean(pair[1]));
  return said.length > 0 ? Object.fromEntries(said) : undefined;
}

function readConnection(file: string, found: FoundToken | undefined, tls: Tls | undefined): Endpoints {
  let content: { addresses: Record<string, string>; token: string | null; ca?: string; discover?: boolean };
  try {
    const info = statSync(file);
    if (!isClosed(info, getuid?.())) {
      throw configuration(`${file} has a token, so only you may read it: chmod 600 ${file}`, "CONNECTION_FILE_OPEN");
    }
    content = JSON.parse(readFileSync(file, "utf-8"));
    if (typeof content.addresses !== "object" || content.addresses === null || content.token === undefined) {
      throw new SyntaxError("no addresses");
    }
  } catch (error) {
    if (error instanceof ConfigurationError) {
      throw error;
    }
    const what =
      error instanceof SyntaxError
        ? `${file} is not a connection file: remove it, or start \`penstock up\` again`
        : `${file} cannot be read: ${(error as Error).message}`;
    throw configuration(what, "CONNECTION_FILE", error);
  }
  const ca = content.ca === undefined ? undefined : { caFile: resolvePath(dirname(file), content.ca) };
  const sent = found?.token === undefined ? { token: content.token ?? undefined, origin: file } : found;
  const endpoints = checked(content.addresses, sent, tls ?? ca);
  return { ...endpoints, discover: endpoints.discover && content.discover !== false };
}

/**
 * Whether nobody but a user, root, and those whom root lets read it can read or change a file. Kubernetes mounts a Secret as a file of
 * root that one group may read.
 */
export function isClosed({ uid, mode }: { readonly uid: number; readonly mode: number }, user: number | undefined): boolean {
  return uid === 0 ? (mode & 0o037) === 0 : uid === user && (mode & 0o077) === 0;
}

/**
 * Whether the file is there and the stack that wrote it still runs: one that was killed leaves its file behind. A stack of another
 * machine, with which this one shares the directory, counts as running, since its process is not seen from here, unless it has an
 * address that leads to this machine here.
 */
function isLive(file: string): boolean {
  let said: { readonly pid?: unknown; readonly host?: string; readonly addresses: Record<string, string> };
  try {
    said = JSON.parse(readFileSync(file, "utf-8"));
    if (typeof said.pid === "number" && (said.host ?? hostname()) !== hostname()) {
      const found = checked(said.addresses, { token: undefined, origin: file }, undefined);
      return !Object.values(found.addresses).some(isLocal);
    }
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== "ENOENT"; // reading it again shows what is wrong
  }
  if (typeof said.pid !== "number") {
    return true;
  }
  try {
    kill(said.pid, 0); // also where files of earlier versions name no host
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== "ESRCH";
  }
}

/** Where `penstock up` says how to reach what it started. */
function usualConnectionFile(): string {
  const state = env["XDG_STATE_HOME"] || `${homedir()}/.local/state`;
  return env["PENSTOCK_CONNECTION"] || `${state}/penstock/connection.json`;
}

function givenToken({ token }: ConnectOptions): FoundToken | undefined {
  return token === undefined ? undefined : { token, origin: GIVEN };
}

function environmentToken(): FoundToken {
  const file = env["PENSTOCK_TOKEN_FILE"];
  if (env["PENSTOCK_TOKEN"] !== undefined || file === undefined) {
    return { token: env["PENSTOCK_TOKEN"], origin: "PENSTOCK_TOKEN" };
  }
  try {
    return { token: readFileSync(file, "utf-8").replace(/\r?\n$/, ""), origin: `PENSTOCK_TOKEN_FILE (${file})` };
  } catch (error) {
    throw configuration(`PENSTOCK_TOKEN_FILE names ${file}, which cannot be read`, "TOKEN", error);
  }
}

function isAddress(address: string): boolean {
  if (address.startsWith("unix:")) {
    return address.length > "unix:".length;
  }
  const [, port] = /^[^/\s]+:(\d{1,5})$/.exec(address) ?? [];
  return port !== undefined && Number(port) > 0 && Number(port) < 65536;
}

/** Whether traffic to an address stays on this machine; a name other than localhost may resolve anywhere. */
export function isLocal(address: string): boolean {
  if (address.startsWith("unix:")) {
    return true;
  }
  const host = address.slice(0, address.lastIndexOf(":")).replace(/^\[|\]$/g, "");
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

function configuration(message: string, reason: string, cause?: unknown): ConfigurationError {
  return new ConfigurationError(message, { reason, cause });
}
