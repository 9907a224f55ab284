"""What a failing test of this suite shows of its daemons, and the deadlines that its hosts have."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

from tests.support import last_words
from tests.support.patience import patient
from tests.support.streams import Stream


def test_the_report_has_the_ends_of_logs_and_how_far_streams_came(tmp_path: Path) -> None:
    (tmp_path / "state/log").mkdir(parents=True)
    (tmp_path / "state/log/belayerd.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "state/log/empty.log").write_text("")
    stream = Stream("http://nowhere", "/v1/completions", {})
    stream.seen.chunks.append({"choices": [{"token_ids": [1, 2], "finish_reason": "length"}]})
    things = [("host", SimpleNamespace(root=tmp_path)), ("streams", {"one": stream}), ("gone", tmp_path / "x")]
    shown = dict(last_words.sections(things))
    assert "2 tokens, finishes ['length'], done 0" in shown["streams"]
    (said,) = (text for title, text in shown.items() if str(tmp_path) in title)
    assert said.startswith("--- state/log/belayerd.log\n")
    assert said.endswith("line 99")
    assert "line 50\n" not in said
    assert "empty" not in said


def test_a_host_that_is_broken_on_purpose_keeps_its_own_deadlines() -> None:
    own = '[router]\nport = 1\nlink_silence_s = 4.0\n\n[[slot]]\nname = "s"\n[policy]\nfence_deadline_s = 5.0\n'
    table = tomllib.loads(patient(own))
    assert (table["router"]["link_silence_s"], table["policy"]["fence_deadline_s"]) == (4.0, 5.0)
    assert table["router"]["request_deadline_s"] > table["policy"]["step_deadline_s"] + 5.0
    assert "fleet" not in table
    assert table["slot"] == [{"name": "s"}]
