"""A stand-in of E2B's cloud for tests: its control plane and its envd, as the unmodified SDK speaks to them.

Purpose: the E2B backend is tested through the real `e2b` SDK without credentials or a network. Each sandbox that is
made here is real: its own user, pid, mount, network, ipc and uts namespaces under bubblewrap, `/bin/bash -l -c`, a root
and a `user` inside. Run it as a program (`python -m tests.support.e2b_cloud`); it tells its address on standard output.

What of the real service it does NOT show
- Isolation: a shared kernel, not a virtual machine; no limits of memory, processor or disk, and no figures of them.
- The internet: there is none in any sandbox, whatever was asked for. That it was asked to be closed is recorded (and
  answered by GET /sandboxes/{id}, as the real service does), not enforced. Nothing of E2B's egress filter is here.
- Public URLs of ports (`https://PORT-ID.e2b.app`): there are none; `allow_public_traffic` is recorded only.
- Memory: a snapshot or fork keeps files, never processes, as `mode="filesystem"` asks; a paused sandbox's processes are
  stopped (SIGSTOP, which shells with job control see) and stay in this machine's memory.
- PTYs, watching directories, signed URLs, volumes, secrets, templates' builds, teams, and real quotas. Metrics are of
  memory and files alone.
- HTTP/2 and TLS: a plain address makes the SDK speak HTTP/1.1. E2B's edge, its proxies' idle timeouts and its limits
  of streams are not here; dropped streams, 429 and HTML errors are made on demand through /control.
- Latency: E2B is tens to hundreds of milliseconds away; this is on loopback.

What it does show, as measured against envd 0.6: a command's timeout ends its shell and leaves the shell's children; a
cancelled client leaves its command; reattaching to a command gives only what comes from then on, and a finished one is
unknown; the end of the stream waits for whoever holds the pipes; a sandbox ends at its timeout; an idempotency key
makes one sandbox; a sandbox that is gone is a 502 with E2B's words, and so is one that is paused
or being copied, whose streams are cut; a resume gives another access token.
"""
