"""The only place that touches vLLM's internals. Pinned to one vLLM; each hook checks what it hooks.

No hook patches vLLM: a loader is registered, worker and scheduler are subclasses named by setting, the
engine core is a subclass. ``checks.self_check`` runs before any engine is built and refuses by name when
vLLM is not the one that these hooks were written against.
"""
