"""gpuowner: a vault of memory that outlives workers, and the states that say who may use it.

Two instances run on a host, one for weights and one for KV arenas. The owner runs no inference and
imports neither torch nor vLLM: what could crash it is what it does not have.
"""
