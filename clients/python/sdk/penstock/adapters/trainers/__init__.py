"""Rollouts in trainers' formats: pure functions, one module per trainer, none of which imports the trainer.

    selection = select(await group.results(), one_sequence=True)
    for dropped in selection.dropped: print(dropped)            # nothing is left out in silence
    samples = slime.samples(selection, filler_token_id=0)       # or trl, verl, skyrl, ...

docs/guides/trainers.md describes how each treats branches, masks, versions and truncation.
"""

from penstock.adapters.trainers.selection import Dropped, DropReason, Place, Row, Selection, select

__all__ = ["DropReason", "Dropped", "Place", "Row", "Selection", "select"]
