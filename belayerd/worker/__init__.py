"""The worker: one vLLM engine with its own loop, forked from a zygote, standby first and main by
promotion."""
