"""`penstock eval`: task sets, with one agent or several."""
