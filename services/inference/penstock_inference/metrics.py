"""The inference service's metrics; docs/guides/operate.md lists them. Imports nothing of the service."""

from __future__ import annotations

from typing import Final

from penstock_chassis.telemetry.metrics import gauge, histogram, total

RUNNING: Final = gauge("penstock_inference_running_requests", "Requests in the batch")
WAITING: Final = gauge("penstock_inference_waiting_requests", "Requests that wait for a slot in the batch")
SLOTS: Final = gauge("penstock_inference_slots", "Slots in the batch, of all replicas")
CACHE_USE: Final = gauge("penstock_inference_cache_use_ratio", "Share of the key-value cache in use")
POLICY_VERSION: Final = gauge("penstock_inference_policy_version", "Policy version in force")
PAUSED: Final = gauge("penstock_inference_paused", "1 while generation is paused")
REPLICAS: Final = gauge("penstock_inference_replicas", "Engines behind the service", "state")
RESTARTS: Final = total("penstock_inference_replica_restarts_total", "Restarts of engines")
TOKENS: Final = total(
    "penstock_inference_tokens_total", "Tokens: computed of prompts, found in the cache, sampled", "kind"
)
REQUESTS: Final = total("penstock_inference_requests_total", "Requests that ended", "end")
BUSY: Final = total("penstock_inference_busy_seconds_total", "Time inside the engines' steps")
UPDATE_SECONDS: Final = histogram("penstock_inference_update_seconds", "Weight updates, by phase", "phase")
LOGPROB_GAP: Final = gauge(
    "penstock_inference_logprob_gap", "The gap between trainers' and the engine's logprobs, as last reported", "figure"
)
