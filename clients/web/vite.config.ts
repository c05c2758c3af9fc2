// Builds the dashboard into the Python package that serves it.
//
// Invariants: no inline script or style (the page's content security policy forbids both), no address outside of the page's own
// origin, and every asset under a name that carries its hash.
import { defineConfig } from "vitest/config";

const here = (path: string) => decodeURIComponent(new URL(path, import.meta.url).pathname);

export default defineConfig({
  base: "./",
  resolve: {
    alias: { "@gen": here("../typescript/src/gen") },
    // The generated messages lie beside the TypeScript client and are compiled against this package's runtime.
    dedupe: ["@bufbuild/protobuf", "@connectrpc/connect"],
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: here("../python/sdk/penstock/dashboard/static"),
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  server: { fs: { allow: [here("..")] }, proxy: { "/rpc": "http://127.0.0.1:7790" } },
  // With their sheets, which one test reads.
  test: { include: ["src/**/*.test.ts"], environment: "node", css: true, testTimeout: 60_000, hookTimeout: 60_000 },
});
