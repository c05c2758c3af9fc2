// Which services of each kind there are, and which of them has a rollout or group.
//
// Invariants: what a page shows of a rollout comes from the driver and the gate that have it; an id whose driver is not known is asked
// of the connection's driver first, and of the others only if that one does not know it; what is remembered is bounded.
import { Code, ConnectError } from "@connectrpc/connect";
import type { Home } from "@gen/penstock/driver/v1/rollout_pb";
import { type GetServerInfoResponse, type Member, OperationsService } from "@gen/penstock/ops/v1/operations_service_pb";

import { token } from "./session";
import { client, type Kind } from "./transport";

const FRESH_MS = 5000;
const MOST_REMEMBERED = 20_000;

interface Asked {
  readonly at: number;
  readonly token: string;
  readonly answer: Promise<GetServerInfoResponse>;
}
const asked = new Map<Kind, Asked>();

/** What a service of the connection says of itself and of others; an answer is used for five seconds. */
export function serverInfo(kind: Kind): Promise<GetServerInfoResponse> {
  const known = asked.get(kind);
  if (known && known.token === token.peek() && performance.now() - known.at < FRESH_MS) return known.answer;
  const answer = client(OperationsService).getServerInfo({}, { headers: { "penstock-service": kind } });
  asked.set(kind, { at: performance.now(), token: token.peek(), answer });
  answer.catch(() => asked.delete(kind));
  return answer;
}

/** The services of a kind of which there is a list; empty = there is one, that of the connection. */
export async function members(kind: Kind): Promise<readonly Member[]> {
  // Drivers list drivers, gates and sandbox services; a gate lists its engines.
  const { members } = await serverInfo(kind === "inference" ? "interception" : "driver");
  return members.filter((one) => one.service === kind);
}

/** The names of all drivers; [""] = one, that of the connection. */
export async function driverNames(): Promise<readonly string[]> {
  const names = (await members("driver")).map(({ name }) => name).filter(Boolean);
  return names.length ? names : [""];
}

interface Place {
  readonly driver: string;
  readonly gate: string;
}
const HERE: Place = { driver: "", gate: "" };
const places = new Map<string, Place>();

/**
 * Remembers which services have a rollout; of a group, which driver.
 *
 * @param home what the rollout says of itself; undefined = not known, and what was known stays.
 * @param driver the name of the one that reported it.
 */
export function remember(id: string, home: Pick<Home, "driver" | "gate"> | undefined, driver: string): void {
  const gate = home?.gate ?? gateOf(id);
  places.delete(id);
  places.set(id, { driver: home?.driver || driver, gate });
  for (const oldest of places.keys()) {
    if (places.size <= MOST_REMEMBERED) break;
    places.delete(oldest);
  }
}

/** The name of the driver that has a rollout or group; empty = that of the connection. */
export const driverOf = (id: string): string => (places.get(id) ?? HERE).driver;

/** The name of the gate that has a rollout's calls; empty = that of the connection. */
export const gateOf = (rolloutId: string): string => (places.get(rolloutId) ?? HERE).gate;

/**
 * Asks the driver that has a rollout or group.
 *
 * @param ask asks one driver, by its name.
 * @throws ConnectError what the first of them says, where none knows the id.
 */
export async function findAt<T>(id: string, ask: (driver: string) => Promise<T>): Promise<T> {
  const first = driverOf(id);
  try {
    return await ask(first);
  } catch (error) {
    if (ConnectError.from(error).code !== Code.NotFound) throw error;
    for (const driver of await driverNames()) {
      if (driver === first) continue;
      try {
        return await ask(driver);
      } catch {
        // It does not know the id either, or is away: what the first one said is shown.
      }
    }
    throw error;
  }
}
