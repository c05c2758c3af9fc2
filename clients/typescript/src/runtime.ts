/** The program that runs this package. */

import { ConfigurationError } from "./errors.js";

/** The oldest major version of Node.js that has what the package uses; `engines` in package.json says the same. */
export const OLDEST_NODE = 22;

/** This package's, as package.json has it. Each call names it in its user agent. */
export const VERSION = "0.1.0";

/** Throws ConfigurationError NODE_VERSION where Node.js is older: said before a rollout waits for an answer. */
export function requireNode(version: string = process.versions.node): void {
  if (Number.parseInt(version, 10) < OLDEST_NODE) {
    throw new ConfigurationError(
      `@penstock/client needs Node.js ${OLDEST_NODE} or newer; this is v${version}.` +
        " Run the program with a newer one: nodejs.org has them.",
      { reason: "NODE_VERSION" },
    );
  }
}
