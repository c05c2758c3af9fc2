"""Work with trajectories: exports, recordings, comparisons, verification."""
