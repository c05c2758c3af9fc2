"""The small model that wheels of this distribution bring: it solves the demo's tasks, and nothing else.

    python -m penstock_demo.tiny_model DIRECTORY          (`make dist` does)

It learns from supervised examples alone, all of them right, so that it is made without services, from one seed. The
demo itself starts from a weaker one, which leaves reinforcement something to do.
"""

import argparse
from pathlib import Path

from penstock_demo import model
from penstock_demo.learner import Learner
from penstock_demo.tasks import Corpus, build_codec

SEED = 1
RIGHT = {(True, True): 1.0}


def make(directory: Path, cache: Path) -> None:
    """Writes the model into `directory`; weights that `cache` has of an earlier time are taken from there."""
    codec = build_codec()
    learner = Learner(model.ModelConfig(vocab_size=codec.vocab_size), SEED)
    learner.warm_start(Corpus(codec, RIGHT), cache, lambda _: None)
    directory.mkdir(parents=True, exist_ok=True)
    model.export(learner.params, learner.config, codec.files, directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the model comes")
    parser.add_argument("--cache", type=Path, default=Path("runs/demo/cache"), help="trained weights are kept here")
    given = parser.parse_args()
    make(given.directory, given.cache)
