"""What is checked only where there are GPUs: `make gpu`."""
