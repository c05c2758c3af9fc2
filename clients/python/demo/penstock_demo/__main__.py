"""`python -m penstock_demo`, which `penstock demo` becomes."""

from penstock_demo.command import main

if __name__ == "__main__":
    main()
