"""The trajectories of ended rollouts: what is read of them, rewards of their turns, annotations, and exports."""
