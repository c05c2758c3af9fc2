"""`penstock regrade`, `penstock rewards` and `penstock annotate`: further grades and annotations of ended rollouts."""
