"""The main job on real input, with nothing to configure: faults happen, trajectories do not notice."""
