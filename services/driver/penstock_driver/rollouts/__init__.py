"""Running rollouts: from the request to the outcome, with retries and groups.

Each part calls only those after it. `use_cases` checks, records and reads rollouts and groups. `manager` owns all live
rollouts: it starts, cancels and ends them. `runner` runs one rollout, attempt after attempt, and `attempt` one attempt,
phase after phase, with what it is prepared from (`attempt_environments`), holds at other services
(`attempt_resources`), replays (`recovery/attempt_recording`) and keeps (`end_state_capture`). `recorder` numbers one
rollout's events and keeps its phase, over all attempts.
"""
