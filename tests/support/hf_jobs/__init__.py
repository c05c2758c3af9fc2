"""Stand-ins for Hugging Face Jobs, for the unmodified SDKs to talk to; what they start are real processes in real
sandboxes.

`jobs.py` is the Jobs API (REST) and the proxy in front of a job's ports, `machine.py` is a job (bubblewrap with
namespaces of its own), `sandbox_server.py` speaks the routes of the sandbox server that `huggingface_hub.Sandbox`
drives, and `relay.py` leads to a port inside a job (what `hf-sandbox` starts there is its own server, from its own
wheel).

What they show: that our backend and the SDKs of these very versions understand each other on every route, and what
happens when a stream is cut, a request fails, a job vanishes, a token is wrong, a sandbox idles or our service is
killed.

What they do NOT show of the real service:
- Latency and throughput of the real proxy, scheduling, cold starts, image pulls, quotas, prices, rate limits, and the
  proxy's own limits on a request's size and duration.
- The machine: a job there is a virtual machine with a flavor's processors and memory and the image that was asked
  for; here every image is this host's programs, read-only, and only its name is checked.
- The network: a job there reaches the whole internet. Here it has a loopback and nothing else, so that nothing that a
  test does here is evidence for isolation there.
- The bootstrap by which a job downloads the sandbox server and checks its digest: the stand-in's server is started in
  its place. Its behaviour follows the published description and source of the real one (foreground commands do not
  count as activity and outlive their client; output is decoded leniently in pieces of 32 KiB; an exec body has at
  most 16 MiB), as read; it was not compared with a running one.
- That a label filter, a cancelled job or a namespace is honoured by the real API as it is here.
"""
