"""Sets of tasks: images, solutions, importers of other formats."""
