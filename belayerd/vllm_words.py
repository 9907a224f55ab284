"""Why vLLM refuses a configuration: its facts in one line, and what to change in ours."""

from __future__ import annotations

import re
import traceback

from pydantic import ValidationError

from belayer.errors import ConfigInvalid

KV_CHECK = "_check_enough_kv_cache_memory"
# vLLM's own advice names options, variables and pages that mean nothing here.
_ADVICE = re.compile(r"(To allow overriding|Try increasing) .*")


def reason(why: BaseException) -> str:
    """All that it says in one line. A text of several lines begins with a headline that tells how many errors there
    are, not which."""
    said = "; ".join(str(row["msg"]) for row in why.errors()) if isinstance(why, ValidationError) else str(why)
    said = " ".join(said.replace("Value error, ", "").split())
    return _ADVICE.sub("", said).strip(" '").removesuffix(".") or type(why).__name__


def remedy(why: BaseException) -> str:
    """The key of ours that is the cause, where that is known."""
    return "lower slot.max_model_len" if "max_model_len" in str(why) else ""


def too_little_kv(why: ValueError, kv_bytes: int, max_model_len: int) -> ConfigInvalid | None:
    """What to raise in the place of ``why`` when it comes from vLLM's check of the KV cache. The check is known by its
    name in the traceback: its words may change, and no other ValueError may be taken for it."""
    frames = traceback.extract_tb(why.__traceback__)
    if not frames or frames[-1].name != KV_CHECK:
        return None
    return ConfigInvalid(
        f"slot.kv_bytes = {kv_bytes} is too little for one request of slot.max_model_len = {max_model_len} tokens: "
        f"{reason(why)}",
        remedy="raise slot.kv_bytes, or lower slot.max_model_len",
    )
