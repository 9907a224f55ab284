"""Memory backends of the vault; each passes the same contract tests (tests/contract)."""
