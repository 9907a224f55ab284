"""For the whole suite.

pytest asks ``tracemalloc`` where an unclosed object was made, and imports it at that moment, which can be inside the
collector, inside another import of it: then a test errs over a half-made module. Imported here, it is whole.
"""

import tracemalloc

__all__ = ["tracemalloc"]
