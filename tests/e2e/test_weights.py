"""Any architecture from the owner's memory: bytes and tokens of vLLM's own loader, before and after an update."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import rank_parts
from tests.support.architectures import COUNT, ENGINES, PACKED
from tests.support.owner_stack import REPO
from tests.support.tiny_models import KINDS, REFUSED

pytestmark = pytest.mark.engine

SAME = 1e-4  # vLLM's own engine packs float32 matrices and then sums in another order
PLAIN = {"llama", "qwen2", "qwen3", "mistral"}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    root = tmp_path_factory.mktemp("architectures")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.architectures", str(root)], cwd=REPO, capture_output=True, text=True,
        timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    yield {path.stem: json.loads(path.read_bytes()) for path in root.glob("*.json")}
    print(done.stderr[-8000:])  # shown with a failure


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_layout_holds_the_bytes_that_vllms_loader_puts_there(results: Results, kind: str) -> None:
    got = results[f"bytes-{kind}"]
    assert got["plain"] == (kind in PLAIN), "the rule is used for the architectures that it was written for"
    assert got["count"] > 10
    assert got["differ"] == []
    assert got["rule_differs"] == [], "the rule gives the shapes that vLLM's loader was seen to fill"
    assert any(name.endswith("c_attn.weight") for name in got["reordered"]) == (kind == "gpt2"), "it is transposed"


@pytest.mark.parametrize("kind", rank_parts.KINDS)
def test_each_ranks_part_holds_the_bytes_that_vllms_loader_puts_there(results: Results, kind: str) -> None:
    got = results[f"ranks-{kind}"]
    assert got["count"] > 10
    assert got["differ"] == []
    assert len(set(got["digests"])) == rank_parts.RANKS
    if kind == "llama":
        assert any("qkv_proj" in name for name in got["halved"])
        assert any("down_proj" in name for name in got["halved"])


@pytest.mark.parametrize("kind", list(REFUSED))
def test_an_architecture_whose_loader_computes_is_refused_by_name(results: Results, kind: str) -> None:
    said = results[f"refused-{kind}"]["said"]
    assert "the engine's loader computes what it puts into" in said
    assert "query_key_value" in said


@pytest.mark.parametrize("kind", list(ENGINES))
def test_tokens_are_those_of_vllms_own_loader_before_and_after_an_update(results: Results, kind: str) -> None:
    got = results[f"engine-{kind}"]
    for theirs, ours in zip(got["theirs"], got["ours"], strict=True):
        assert len(ours["tokens"]) == COUNT
        assert ours["tokens"] == theirs["tokens"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=SAME)
    assert got["ours"][0] != got["ours"][1], "other weights, other tokens"
    assert got["across"] == got["continued"], "a request on board goes on with the new weights alone"
    assert got["across"][:5] == got["ours"][0]["tokens"][:5], "and keeps what it had said"
    assert got["moved"] == [1, 2, ENGINES[kind][1] == "swap"]
    assert got["version"] == "2"
    assert [version for version, _ in got["oracles"]] == [1, 2]


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_those_of_the_version_that_is_served(results: Results, kind: str) -> None:
    """R4: a packed form that an update forgot would go on serving the old version under the new one's name."""
    got, plain = results[f"packed-{kind}"], results[f"engine-{kind}"]
    assert got["packed"] > 0
    assert plain["packed"] == 0, "only where a slot asks for it"
    for theirs, ours in zip(got["theirs"], got["ours"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=SAME)
    assert got["ours"][0] != got["ours"][1], "other weights, other tokens"
    assert got["across"] == got["continued"], "a request on board goes on with the new weights alone"
    assert got["moved"][:2] == [1, 2]
    assert got["outside"] == [], "what is packed is a view as well: verified, updated, shared"


@pytest.mark.parametrize("kind", list(ENGINES))
def test_every_parameter_is_a_view_or_a_named_copy(results: Results, kind: str) -> None:
    got = results[f"engine-{kind}"]
    assert got["outside"] == got["copied"]
    assert len(got["parameters"]) == got["views"] + len(got["copied"])
    assert set(got["parameters"]) - set(got["copied"]) <= set(got["same_addresses"]), "no view moved by the update"
    assert bool(got["copied"]) == (kind == "qwen3_moe")
    assert all(".routed_experts." in name for name in got["copied"])
