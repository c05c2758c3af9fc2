/** Where one sandbox is served, if not at the sandbox service that was asked: an address and a token of its own. */

import type { Timestamp } from "@bufbuild/protobuf/wkt";
import { unlessAborted } from "../calls.js";
import { checked, type Endpoints } from "../endpoints.js";
import { PenstockError } from "../errors.js";
import type { DataPlane } from "../gen/penstock/sandbox/v1/sandbox_pb.js";
import { type RenewedToken, Service } from "../rpc.js";
import { time } from "../wire.js";
import type { SandboxNode } from "./sandboxes.js";

/** How long before its end a token is renewed. */
const RENEW_MS = 60_000;
const ASK_MS = 5000;

/**
 * The service that has one sandbox. A sandbox stays at its address; its token is renewed before it ends.
 *
 * @param creator the service that named it, and gives new tokens.
 */
export function dataPlane(creator: SandboxNode, endpoints: Endpoints, sandboxId: string, plane: DataPlane): Service {
  const { addresses, tls } = endpoints;
  const found = { token: plane.token || undefined, origin: "the sandbox service, with this sandbox" };
  const where = checked({ ...addresses, sandbox: plane.address }, found, tls);
  return new Service("sandbox", where, { token: new PlaneToken(creator, sandboxId, plane) });
}

class PlaneToken implements RenewedToken {
  readonly #creator: SandboxNode;
  readonly #sandboxId: string;
  #text: string;
  /** In ms since 1970; undefined = it does not end. */
  #ends: number | undefined;
  #renewing: Promise<void> | undefined;

  constructor(creator: SandboxNode, sandboxId: string, { token, tokenExpireTime }: DataPlane) {
    this.#creator = creator;
    this.#sandboxId = sandboxId;
    this.#text = token;
    this.#ends = endOf(tokenExpireTime);
  }

  get text(): string | undefined {
    return this.#text || undefined;
  }

  /** Gets a new one, if it ends soon. Rejects with a PenstockError where it has ended, and there is no new one. */
  async renew(signal?: AbortSignal): Promise<void> {
    if (this.#ends === undefined || Date.now() < this.#ends - RENEW_MS) {
      return;
    }
    // All calls meanwhile share one answer, which none of them aborts.
    this.#renewing ??= this.#renew().finally(() => {
      this.#renewing = undefined;
    });
    this.#renewing.catch(() => {}); // the awaiting calls get the error
    try {
      await (signal === undefined ? this.#renewing : unlessAborted(this.#renewing, signal));
    } catch (error) {
      if (!(error instanceof PenstockError) || Date.now() >= this.#ends) {
        throw error;
      }
    }
  }

  async #renew(): Promise<void> {
    const { service, client } = this.#creator;
    const sandboxId = this.#sandboxId;
    // While the token is in force nobody waits for a service that is away.
    const options = { timeoutMs: ASK_MS, repeatable: Date.now() >= (this.#ends ?? 0) };
    const { dataPlane: plane } = await service.call((call) => client.getDataPlane({ sandboxId }, call), options);
    this.#text = plane?.token ?? "";
    this.#ends = endOf(plane?.tokenExpireTime);
  }
}

function endOf(end: Timestamp | undefined): number | undefined {
  return time(end)?.getTime();
}
