"""`penstock tasks assay` and `penstock scan`: whether tasks, and what agents did with them, are fit to train on."""
