"""How well `penstock tasks assay` finds planted defects: a corpus of tasks, and the command that assays it."""
