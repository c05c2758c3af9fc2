"""Distillation of the demo's policy as a program: clients/python/demo/penstock_demo/distill.py has its code.

python examples/distill/train.py --seed 2               (after `make demo`, whose trained model is the teacher)
"""

from penstock_demo.distill import main

if __name__ == "__main__":
    main()
