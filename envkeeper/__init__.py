"""envkeeper: sandboxes, their checkpoints, and what brings them back (promises E1-E8)."""
