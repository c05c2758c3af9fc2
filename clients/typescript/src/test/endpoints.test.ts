/** Where the services are, and where a token may go. */

import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { hostname, tmpdir } from "node:os";
import { join } from "node:path";
import { env, pid } from "node:process";
import { afterEach, beforeEach, describe, it } from "node:test";
import { type ConnectOptions, isClosed, resolve, tokenAdvice } from "../endpoints.js";
import { ConfigurationError } from "../errors.js";

const KEYS = ["TOKEN", "TOKEN_FILE", "CA_FILE", "CONNECTION", "DRIVER_ADDRESS", "DISCOVER"].map((name) => `PENSTOCK_${name}`);

function refused(given: ConnectOptions): string {
  try {
    resolve(given);
  } catch (error) {
    assert(error instanceof ConfigurationError);
    return error.reason;
  }
  return "";
}

describe("where the services are", () => {
  let folder = "";

  beforeEach(() => {
    folder = mkdtempSync(join(tmpdir(), "penstock-"));
    for (const key of KEYS) {
      delete env[key];
    }
    env["XDG_STATE_HOME"] = folder;
  });
  afterEach(() => rmSync(folder, { recursive: true }));

  function file(content: object | string, mode = 0o600): string {
    const path = join(folder, "connection.json");
    writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
    chmodSync(path, mode);
    return path;
  }

  it("is loopback when nothing is said", () => {
    assert.deepEqual(resolve().addresses, {
      sandbox: "127.0.0.1:7701",
      driver: "127.0.0.1:7702",
      interception: "127.0.0.1:7703",
      inference: "127.0.0.1:7704",
    });
  });

  it("is what the caller says before the environment, and that before the file", () => {
    env["PENSTOCK_CONNECTION"] = file({ pid, addresses: { driver: "127.0.0.1:3" }, token: "filed" });
    assert.deepEqual(
      [resolve().addresses.driver, resolve().token, resolve({ token: "said" }).token],
      ["127.0.0.1:3", "filed", "said"],
    );
    env["PENSTOCK_DRIVER_ADDRESS"] = "127.0.0.1:2";
    env["PENSTOCK_TOKEN"] = "surrounding";
    assert.deepEqual([resolve().addresses.driver, resolve().token], ["127.0.0.1:2", "surrounding"]);
    assert.equal(resolve({ addresses: { driver: "127.0.0.1:1" } }).addresses.driver, "127.0.0.1:1");
    assert.equal(resolve({ host: "::1" }).addresses.driver, "[::1]:7702");
  });

  it("is not what a stack said that is dead", () => {
    env["PENSTOCK_CONNECTION"] = file({ pid: 2 ** 22 + 1, addresses: { driver: "127.0.0.1:3" }, token: "filed" });
    assert.deepEqual([resolve().addresses.driver, resolve().token], ["127.0.0.1:7702", undefined]);
  });

  it("is what a stack of another machine said, whose process is not seen from here", () => {
    const addresses = { sandbox: "10.0.0.1:1", driver: "10.0.0.1:2", interception: "far.example:3", inference: "" };
    const content = { pid: 2 ** 22 + 1, addresses, token: "filed", ca: "ca.pem" };
    env["PENSTOCK_CONNECTION"] = file({ ...content, host: "another-node" });
    assert.deepEqual([resolve().addresses.driver, resolve().token], ["10.0.0.1:2", "filed"]);
    env["PENSTOCK_CONNECTION"] = file({ ...content, host: hostname() });
    assert.deepEqual([resolve().addresses.driver, resolve().token], ["127.0.0.1:7702", undefined]);
  });

  it("is not what a stack of another machine said whose addresses only that machine reaches", () => {
    // Home directories on NFS: the process that listens at such an address here must not get the token.
    const far = { sandbox: "10.0.0.1:1", interception: "10.0.0.1:3", inference: "10.0.0.1:4" };
    for (const driver of ["127.0.0.1:7702", "[::1]:7702", "localhost:7702", "unix:/run/driver", undefined]) {
      const addresses = { ...far, driver };
      env["PENSTOCK_CONNECTION"] = file({ pid, host: "another-node", addresses, token: "filed", ca: "ca.pem" });
      const { addresses: found, token } = resolve();
      assert.deepEqual([found.sandbox, found.driver, token], ["127.0.0.1:7701", "127.0.0.1:7702", undefined], driver);
    }
  });

  it("names a certificate beside the file that names it", () => {
    const path = file({ pid: null, addresses: { driver: "far.example:1" }, token: "t", ca: "ca.pem" });
    assert.deepEqual(resolve({ connectionFile: path }).tls, { caFile: join(folder, "ca.pem") });
  });

  it("refuses files that are open, broken or absent", () => {
    assert.equal(refused({ connectionFile: file({ addresses: {}, token: null }, 0o644) }), "CONNECTION_FILE_OPEN");
    assert.equal(refused({ connectionFile: file("{") }), "CONNECTION_FILE");
    assert.equal(refused({ connectionFile: file("[]") }), "CONNECTION_FILE");
    assert.equal(refused({ connectionFile: join(folder, "none") }), "CONNECTION_FILE");
  });

  it("takes a file of root that a group may read, as Kubernetes mounts a Secret", () => {
    const files: readonly (readonly [number, number, number, boolean])[] = [
      [0, 1000, 0o400, true],
      [0, 1000, 0o440, true],
      [0, 1000, 0o640, true],
      [0, 1000, 0o460, false],
      [0, 1000, 0o444, false],
      [0, 0, 0o400, true],
      [0, 0, 0o440, true],
      [0, 0, 0o460, false],
      [0, 0, 0o444, false],
      [1000, 1000, 0o600, true],
      [1000, 1000, 0o440, false],
      [1001, 1000, 0o400, false],
    ];
    for (const [uid, user, mode, taken] of files) {
      assert.equal(isClosed({ uid, mode: 0o100000 + mode }, user), taken, `of ${uid} for ${user}, mode ${mode.toString(8)}`);
    }
  });

  it("refuses addresses that are none, and two answers to one question", () => {
    for (const driver of ["x", "x:", ":1", "x:0", "x:65536", "x:1a", "unix:", "a/b:1", "x y:1"]) {
      assert.equal(refused({ addresses: { driver } }), "TARGET", driver);
    }
    for (const host of ["", " ", "a/b", "a:1"]) {
      assert.equal(refused({ host }), "TARGET", host);
    }
    assert.equal(refused({ addresses: { nobody: "x:1" } as never }), "TARGET");
    assert.equal(refused({ host: "a", connectionFile: "b" }), "TARGET");
  });

  it("sends a token in clear to this machine only", () => {
    for (const driver of ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/x"]) {
      assert.equal(refused({ addresses: { driver }, token: "t" }), "", driver);
    }
    for (const driver of ["192.0.2.1:1", "localhost.example:1", "127.0.0.1.example:1", "[::2]:1", "0.0.0.0:1"]) {
      assert.equal(refused({ addresses: { driver }, token: "t" }), "TOKEN_IN_CLEAR", driver);
      assert.equal(refused({ addresses: { driver } }), "", driver);
      assert.equal(refused({ addresses: { driver }, token: "t", tls: {} }), "", driver);
    }
  });

  it("says where a token that is not taken was found, and what to do", () => {
    const path = file({ pid, addresses: { driver: "127.0.0.1:3" }, token: "secret" });
    env["PENSTOCK_CONNECTION"] = path;
    assert.match(tokenAdvice(resolve({ token: "secret" })), /from the calling program: the services may have/);
    assert.match(tokenAdvice(resolve()), new RegExp(`is from ${path}: the services may have been restarted since`));
    const named = join(folder, "token");
    writeFileSync(named, "secret\n");
    env["PENSTOCK_TOKEN_FILE"] = named;
    assert.ok(
      tokenAdvice(resolve()).endsWith(
        `is from PENSTOCK_TOKEN_FILE (${named}): set it to a token of these services, or unset PENSTOCK_TOKEN_FILE to use that of ${path}.`,
      ),
    );
    env["PENSTOCK_TOKEN"] = "secret";
    assert.match(tokenAdvice(resolve()), /from PENSTOCK_TOKEN: set it .* unset PENSTOCK_TOKEN to use/);
    assert.match(tokenAdvice(resolve({ connectionFile: path })), new RegExp(`from ${path}: `));
    assert.doesNotMatch(tokenAdvice(resolve()), /secret/);
  });

  it("has no driver asked for others unless a program names one, and not where the environment says so", () => {
    assert.equal(resolve({ addresses: { driver: "127.0.0.1:7" } }).discover, true);
    assert.equal(resolve({ addresses: { sandbox: "127.0.0.1:7" } }).discover, false);
    assert.equal(resolve({ discover: false }).discover, false);
    env["PENSTOCK_DISCOVER"] = "False";
    assert.equal(resolve({ addresses: { driver: "127.0.0.1:7" } }).discover, false);
    env["PENSTOCK_DISCOVER"] = "perhaps";
    assert.equal(refused({}), "DISCOVER");
  });

  it("has no driver asked for others where the connection file says so", () => {
    const content = { pid: null, addresses: { driver: "127.0.0.1:7" }, token: "t" };
    assert.equal(resolve({ connectionFile: file(content) }).discover, true);
    const path = file({ ...content, discover: false });
    assert.equal(resolve({ connectionFile: path }).discover, false);
    env["PENSTOCK_CONNECTION"] = path;
    assert.equal(resolve().discover, false);
  });

  it("says where a token may come from when none was sent", () => {
    const told = tokenAdvice(resolve());
    assert.match(told, /^No token was sent: set PENSTOCK_TOKEN to .* PENSTOCK_CONNECTION to a connection file/);
    assert.ok(told.includes(join(folder, "penstock", "connection.json")), told);
  });

  it("refuses tokens that are blank or have more than printable ASCII", () => {
    for (const token of ["", " ", " t", "t\n", "ä", "t\u0000"]) {
      assert.equal(refused({ token }), "TOKEN", JSON.stringify(token));
    }
  });
});
