"""Values of sampling, of weights and of what engines are, and the names that a namespace has."""
