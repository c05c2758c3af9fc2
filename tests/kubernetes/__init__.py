"""A real API server and its controllers, of Kubernetes 1.20 as Debian has its source, and the chart applied to it."""
