"""The demo: GRPO on real rollouts. `penstock demo` runs `train`; `model/` is the small model that wheels bring."""
