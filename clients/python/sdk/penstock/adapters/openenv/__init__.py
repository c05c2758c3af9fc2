"""An OpenEnv-compatible server over the public client: `penstock openenv serve`.

Users of the `openenv` client (`reset`, `step`, `state`, the tool `run_rollout`) migrate by changing an address. It is a
client-side program: it holds a token of the services like any trainer, and starts rollouts.

    arguments   a caller's arguments, validated, and the rollout for them
    rollouts    one rollout from its start to the result of `run_rollout`
    sessions    environments: as many as the operator allows, each closed with all that it started
    mcp         the tool over JSON-RPC
    frames      the WebSocket's messages
    app         HTTP routes and authentication
"""
