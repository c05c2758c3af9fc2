/** All drivers of a connection: which one has a rollout, and which one gets a new one. */

import { type Cluster, homeIn, isAway, type Member, ofSeveral } from "../cluster.js";
import { Driver } from "../driver.js";
import { NotFound } from "../errors.js";
import type { Gate } from "../sessions.js";

type Fetch<T> = (driver: Driver, repeatable: true | "briefly") => Promise<T>;

export class Drivers {
  readonly #cluster: Cluster;
  readonly #gate: Gate;

  constructor(cluster: Cluster, gate: Gate) {
    this.#cluster = cluster;
    this.#gate = gate;
  }

  /** A client of each driver. */
  async all(signal?: AbortSignal): Promise<Driver[]> {
    return (await this.#cluster.members("driver", { signal })).map((member) => this.#driver(member));
  }

  /**
   * The driver that has a rollout or group, and what `fetch` gives there. An id that a driver made names it; for one that a client
   * chose, every driver is asked.
   *
   * @param fetch asks one, and repeats the request as its second argument says.
   *
   * Rejects with NotFound: no driver has it; Unavailable: none that answers has it.
   */
  async having<T>(id: string, fetch: Fetch<T>, signal?: AbortSignal): Promise<[Driver, T]> {
    const home = homeIn(id, "driver");
    let members = await this.#cluster.members("driver", { signal });
    if (home !== undefined && !members.some(({ name }) => name === home)) {
      members = await this.#cluster.members("driver", { signal, ageMs: 0 });
    }
    if (home !== undefined) {
      const named = members.filter(({ name }) => name === home);
      members = named.length > 0 ? named : members.slice(0, 1); // any driver answers HOME_ELSEWHERE
    }
    let unknown: unknown;
    let away: unknown;
    for (const member of members) {
      const driver = this.#driver(member);
      try {
        return [driver, await fetch(driver, ofSeveral(members))];
      } catch (error) {
        if (error instanceof NotFound) {
          unknown = error;
        } else if (isAway(error)) {
          away = error;
        } else {
          throw error;
        }
      }
    }
    throw away ?? unknown;
  }

  /** Makes something new at a driver that takes work: see `Cluster.create`. */
  async create<T>(
    chosen: string,
    make: (driver: Driver, repeatable: true | "unlessDraining") => Promise<T>,
    signal?: AbortSignal,
  ): Promise<[Driver, T]> {
    const at = (member: Member, repeatable: true | "unlessDraining") => make(this.#driver(member), repeatable);
    const [member, made] = await this.#cluster.create("driver", chosen, at, signal);
    return [this.#driver(member), made];
  }

  #driver({ service, name }: Member): Driver {
    return new Driver(service, this.#gate, name, this.#cluster);
  }
}
