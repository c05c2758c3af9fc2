"""`penstock regrade` and `penstock rewards`: further grades of ended rollouts."""
