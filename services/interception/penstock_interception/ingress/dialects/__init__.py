"""The APIs that agents use, one package each; `base` defines the interface of a dialect."""
