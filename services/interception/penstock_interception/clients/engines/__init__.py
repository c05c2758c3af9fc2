"""Several inference services as one model source: who answers a call, and what operators learn of them."""
