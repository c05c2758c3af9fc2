"""File operations shared by guest agents and the local backend. Standard library only."""
