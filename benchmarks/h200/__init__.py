"""The H200 check: state isolation, handover and fault detection on a real GPU, in one bounded run (docs/h200.md).

``fake`` runs the same code on a CPU over the fake driver; it shows that the check works, and no figure of it means
anything for a GPU.
"""
