"""The cases by theme. Those of one theme share a sandbox: each is small, and all must survive together."""
