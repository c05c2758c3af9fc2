"""The demo's trainer as a program: clients/python/demo/penstock_demo has its code.

python examples/grpo/train.py --seed 1                  (or `make demo SEED=1`, or `penstock demo --seed 1`)
"""

from penstock_demo.command import main

if __name__ == "__main__":
    main()
