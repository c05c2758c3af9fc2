/**
 * All drivers, gates and sandbox services, found from one address: a driver says which there are (`GetServerInfo.members`). A gate
 * says so of engines.
 *
 * A member gets the connection's own token. So a driver is asked, and its members are used, only where decision 033 lets the token
 * go: over TLS with the caller's own CA, or from this machine to this machine.
 */

import { createHash } from "node:crypto";
import { unlessAborted } from "./calls.js";
import type { Endpoints, ServiceName } from "./endpoints.js";
import {
  ConfigurationError,
  DeadlineExceeded,
  PenstockError,
  PermissionDenied,
  Unauthenticated,
  Unavailable,
  Unsupported,
} from "./errors.js";
import { type Member as Listed, MemberState, OperationsService } from "./gen/penstock/ops/v1/operations_service_pb.js";
import { mayReceiveToken } from "./homes.js";
import { Backoff, MAX_HOMES, Service } from "./rpc.js";

/** For how long an answer is used before the driver is asked again. */
export const FRESH_MS = 5000;
/** The same for a creation. A service that has begun to drain since says so, and another one is asked. */
const FRESH_FOR_NEW_MS = 1000;
const ASK_MS = 5000;
/** A gate's name for its engines without a name. */
const DEFAULT_POOL = "default";
/** For how long something new is tried again while all of several members drain, as where they are restarted in turn. */
const ALL_DRAIN_MS = 60_000;

const MAKERS: Readonly<Record<string, ServiceName>> = { r: "driver", g: "driver", t: "driver", sb: "sandbox", ss: "sandbox" };
const WITH_HOME = /^(r|g|t|sb|ss)\.([a-z0-9][a-z0-9-]{0,31})\.[0-9a-f]{32}(?:-[0-9]+)?$/;

/** A service of a kind. `name` is empty where it is not known. */
export interface Member {
  readonly name: string;
  readonly service: Service;
  /** Whether the driver that was asked cannot reach it. */
  readonly isLost: boolean;
  readonly takesWork: boolean;
}

export interface MembersOptions {
  /** Whether a driver that is away is waited for, ten seconds at most. Default true. */
  readonly patient?: boolean;
  /** Greatest age of the list. Default 5 s. */
  readonly ageMs?: number;
  /** Whether the service of the connection is enough where no driver can be asked. Default false. */
  readonly orGiven?: boolean;
  readonly signal?: AbortSignal | undefined;
}

/** The name of the service that made an id; undefined = the id names none. */
export function homeIn(id: string, kind: ServiceName): string | undefined {
  const [, maker = "", name] = WITH_HOME.exec(id) ?? [];
  return MAKERS[maker] === kind ? name : undefined;
}

/** Whether a service is away, as far as one call of it says. */
export function isAway(error: unknown): error is Unavailable | DeadlineExceeded {
  return error instanceof Unavailable || error instanceof DeadlineExceeded;
}

/** Whether a service cannot be asked for others. A token that it refuses may be valid at the given service. */
function cannotBeAsked(error: unknown): boolean {
  return isAway(error) || error instanceof Unauthenticated || error instanceof PermissionDenied;
}

/** How a question to all members may be repeated: of several, one that is away is not waited for, since the answer names it. */
export function ofSeveral(members: readonly unknown[]): true | "briefly" {
  return members.length === 1 || "briefly";
}

function memberOf({ name, state }: Listed, service: Service): Member {
  const takesWork = state === MemberState.UP || state === MemberState.UNSPECIFIED;
  return { name, service, isLost: state === MemberState.LOST, takesWork };
}

/** The members of each kind. A kind of which no driver has a list has one member: the service of the connection. */
export class Cluster {
  readonly #endpoints: Endpoints;
  readonly #given: (kind: ServiceName) => Service;
  readonly #opened = new Map<string, Service>();
  /** Names of the services at the connection's own addresses, by kind, as far as they were asked. */
  readonly #names = new Map<ServiceName, string>();
  /** By kind, which member is the next for something new. */
  readonly #turns = new Map<ServiceName, number>();
  #listed: readonly Listed[] = [];
  /** The engines of the gates' default pool, as the last gate that answered has them. */
  #listedEngines: readonly Listed[] = [];
  #askedAt: number | undefined;
  /** Requests for the list, by whether they wait for a driver that is away: who waits shares no error of who does not. */
  readonly #asking = new Map<boolean, Promise<void>>();
  #mayAsk: boolean;
  #closed = false;

  /** @param given gives the services of the connection, which the caller closes. */
  constructor(endpoints: Endpoints, given: (kind: ServiceName) => Service) {
    const { driver } = endpoints.addresses;
    this.#endpoints = endpoints;
    this.#given = given;
    this.#mayAsk = endpoints.discover && driver !== "" && mayReceiveToken(driver, driver, endpoints);
  }

  /**
   * All members of a kind, at least one.
   *
   * Rejects with Unavailable or DeadlineExceeded where no driver can be asked and none ever was; ConfigurationError
   * MEMBER_NOT_TRUSTED: the token must not be sent to a member.
   */
  async members(kind: ServiceName, options: MembersOptions = {}): Promise<Member[]> {
    const { patient = true, ageMs = FRESH_MS, orGiven = false, signal } = options;
    if (orGiven) {
      try {
        return await this.members(kind, { patient: false, ageMs, signal });
      } catch (error) {
        if (cannotBeAsked(error)) {
          return [this.given(kind)];
        }
        throw error;
      }
    }
    signal?.throwIfAborted();
    if (this.#mayAsk && (this.#askedAt === undefined || performance.now() - this.#askedAt >= ageMs)) {
      // All who ask meanwhile share one answer, which no one of them aborts.
      const asking = this.#asking.get(patient) ?? this.#ask(patient).finally(() => this.#asking.delete(patient));
      this.#asking.set(patient, asking);
      asking.catch(() => {}); // the callers that wait get the error
      await (signal === undefined ? asking : unlessAborted(asking, signal));
    }
    const items = this.#listed.filter(({ service }) => service === kind);
    const [only] = items;
    if (items.length === 1 && only !== undefined && (await this.#isGiven(kind, only, signal))) {
      return [memberOf(only, this.#given(kind))];
    }
    const found = items.map((item) => memberOf(item, this.#service(kind, item)));
    return found.length > 0 ? found : [this.given(kind)];
  }

  /** The service of the connection. */
  given(kind: ServiceName): Member {
    return { name: "", service: this.#given(kind), isLost: false, takesWork: true };
  }

  /**
   * The engines of the gates' default pool, at least one: the inference service of the connection, where no gate has a list.
   *
   * Rejects with ConfigurationError MEMBER_NOT_TRUSTED: the token must not be sent to an engine; and with a gate's error. One that
   * is away is no error.
   */
  async engines(signal?: AbortSignal): Promise<Member[]> {
    const { interception } = this.#endpoints.addresses;
    const mayAsk = this.#endpoints.discover && interception && mayReceiveToken(interception, interception, this.#endpoints);
    for (const { service } of mayAsk ? await this.members("interception", { orGiven: true, signal }) : []) {
      const client = service.client(OperationsService);
      try {
        const { members } = await service.call((call) => client.getServerInfo({}, call), { timeoutMs: ASK_MS, signal });
        this.#listedEngines = members.filter(({ pool }) => pool === DEFAULT_POOL);
        break;
      } catch (error) {
        if (!cannotBeAsked(error) && !(error instanceof Unsupported)) {
          throw error;
        }
      }
    }
    const found = this.#listedEngines.map((item) => memberOf(item, this.#service("inference", item)));
    return found.length > 0 ? found : [this.given("inference")];
  }

  /**
   * The member that has something: the one that its id names. Of an id without a home, or of one of an unknown member, it is the
   * service of the connection, which may answer HOME_ELSEWHERE.
   */
  async home(kind: ServiceName, id: string, signal?: AbortSignal): Promise<Member> {
    const home = homeIn(id, kind);
    for (const ageMs of home === undefined ? [] : [FRESH_MS, 0]) {
      const found = (await this.members(kind, { ageMs, orGiven: kind !== "driver", signal })).find(({ name }) => name === home);
      if (found !== undefined) {
        return found;
      }
    }
    return this.given(kind);
  }

  /**
   * Makes something new at a member that takes work. What is chosen, such as an id, goes to the same member from every client; else
   * they take turns. A member that drains has not made it, so another one is asked; while all of several drain, for a minute at most.
   *
   * @param make sends the request, and repeats it as its second argument says.
   */
  async create<T>(
    kind: ServiceName,
    chosen: string,
    make: (member: Member, repeatable: true | "unlessDraining") => Promise<T>,
    signal?: AbortSignal,
  ): Promise<[Member, T]> {
    const draining = new Set<string>();
    const backoff = new Backoff();
    const until = performance.now() + ALL_DRAIN_MS;
    for (let ageMs = FRESH_FOR_NEW_MS; ; ageMs = 0) {
      const [member, isOnly] = await this.#forNew(kind, chosen, draining, ageMs, signal);
      try {
        return [member, await make(member, isOnly || "unlessDraining")];
      } catch (error) {
        if (!(error instanceof Unavailable && error.reason === "DRAINING") || isOnly || performance.now() > until) {
          throw error;
        }
        if (draining.has(member.service.address)) {
          draining.clear(); // all drain
          await member.service.pause(backoff.next(), signal);
        }
        draining.add(member.service.address);
      }
    }
  }

  /** Closes the connections to members; calls that are open end. */
  close(): void {
    this.#closed = true;
    for (const service of this.#opened.values()) {
      service.close();
    }
  }

  /** The member for something new, and whether there is no other. */
  async #forNew(
    kind: ServiceName,
    chosen: string,
    draining: ReadonlySet<string>,
    ageMs: number,
    signal?: AbortSignal,
  ): Promise<[Member, boolean]> {
    const orGiven = kind !== "driver";
    let members = await this.members(kind, { signal, orGiven });
    if (members.length > 1) {
      members = await this.members(kind, { signal, ageMs, orGiven });
    }
    const isOnly = members.length === 1;
    const taking = members.filter(({ takesWork, service }) => takesWork && !draining.has(service.address));
    if (taking.length > 0) {
      members = taking;
    }
    const [first, ...others] = members as [Member, ...Member[]];
    if (chosen) {
      // Rendezvous hashing, alike in every language: each id ranks all members.
      const rank = ({ name }: Member) => createHash("sha256").update(`${chosen}\0${name}`).digest("hex");
      return [others.reduce((best, other) => (rank(other) > rank(best) ? other : best), first), isOnly];
    }
    // Clients do not all begin with the same member.
    const turn = (this.#turns.get(kind) ?? Math.floor(Math.random() * 65_536)) + 1;
    this.#turns.set(kind, turn);
    return [members[turn % members.length] ?? first, isOnly];
  }

  /**
   * Whether the only member of a kind is the service at the connection's own address, which then is the way to it: the driver's may be
   * of a network that this client is not in.
   */
  async #isGiven(kind: ServiceName, { name, address }: Listed, signal?: AbortSignal): Promise<boolean> {
    const own = this.#endpoints.addresses[kind];
    if (!own || !name || !this.#mayAsk) {
      return false;
    }
    if (own === address) {
      return true;
    }
    if (!this.#names.has(kind)) {
      const service = this.#given(kind);
      const client = service.client(OperationsService);
      try {
        const { server } = await service.call((call) => client.getServerInfo({}, call), { timeoutMs: ASK_MS, signal });
        this.#names.set(kind, server?.name ?? "");
      } catch (error) {
        if (error instanceof PenstockError) {
          return false; // a call to the member has the error
        }
        throw error;
      }
    }
    return this.#names.get(kind) === name;
  }

  /** Asks the connection's driver, or another one that is known. */
  async #ask(patient: boolean): Promise<void> {
    const isFirst = this.#askedAt === undefined;
    const others = this.#listed.filter(({ service }) => service === "driver");
    const asked = new Set<Service>();
    for (const of of [() => this.#given("driver"), ...others.map((item) => () => this.#service("driver", item))]) {
      const service = of();
      if (asked.has(service)) {
        continue; // the connection's own is listed too
      }
      asked.add(service);
      const client = service.client(OperationsService);
      try {
        const options = { timeoutMs: ASK_MS, repeatable: patient && isFirst };
        const { server, members } = await service.call((call) => client.getServerInfo({}, call), options);
        this.#take(members, server?.name ?? "", service);
        return;
      } catch (error) {
        if (error instanceof Unsupported) {
          this.#mayAsk = false; // an older driver
          return;
        }
        if (isFirst || !isAway(error)) {
          throw error;
        }
      }
    }
    // All are away. The list stays, and a user of a member that is away gets an error that names it. They are asked again as
    // after an answer: else each call would wait for them.
    this.#askedAt = performance.now();
  }

  #take(members: readonly Listed[], own: string, asked: Service): void {
    const drivers = members.filter(({ service }) => service === "driver");
    const listed = [...members];
    if (drivers.length > 0 && !drivers.some(({ name }) => name === own)) {
      // Its list of drivers lacks itself.
      listed.push({
        $typeName: "penstock.ops.v1.Member",
        service: "driver",
        name: own,
        pool: "",
        address: asked.address,
        certifiedName: "",
        state: MemberState.UNSPECIFIED,
      });
    }
    this.#listed = listed;
    this.#askedAt = performance.now();
  }

  #service(kind: ServiceName, { address, name, certifiedName }: Listed): Service {
    const { addresses } = this.#endpoints;
    if (addresses[kind] === address && !certifiedName) {
      return this.#given(kind);
    }
    const key = JSON.stringify([kind, address, certifiedName]);
    let service = this.#opened.get(key);
    if (service === undefined) {
      const lister = kind === "inference" ? addresses.interception : addresses.driver;
      if (!mayReceiveToken(lister, address, this.#endpoints)) {
        throw new ConfigurationError(
          `The ${kind} service ${name} is at ${address}, where the token must not be sent: use tls with your own CA, or` +
            " discover: false for the given addresses only",
          { reason: "MEMBER_NOT_TRUSTED" },
        );
      }
      if (this.#opened.size >= MAX_HOMES) {
        throw new ConfigurationError(`More than ${MAX_HOMES} services are listed`, { reason: "MEMBER_LIMIT" });
      }
      service = new Service(kind, this.#endpoints, { address, name, certifiedName });
      if (this.#closed) {
        service.close();
      }
      this.#opened.set(key, service);
    }
    return service;
  }
}
