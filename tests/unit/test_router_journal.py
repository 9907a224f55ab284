"""The journal: what was appended is read back, whatever byte the writer died at."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.journal import MOST_SEGMENTS, Add, Finish, Journal, Record, Tokens, segments
from belayerd.router.journal_reader import read, records

ROWS: list[Record] = [
    Add("r1", "client-1", (b"\x00\xffframe", b"second"), 12.5),
    Tokens("r1", 0, tuple(range(300)), "slot0", 3, "7", (), "aaaa"),
    Tokens("r1", 300, (5, 6), "slot0", 4, "7", ((301, b"row"),)),
    Add("r2", "", (b"f",), 13.0),
    Finish("r1", "stop", 302, 14.0),
]


def journal(folder: Path, live: list[Record] | None = None, max_bytes: int = 1 << 20) -> Journal:
    return Journal(folder, "abcd", max_bytes, lambda: live or [])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    journal(tmp_path).append(ROWS)
    (path,) = segments(tmp_path)
    assert list(records(path))[1:] == ROWS
    story = read(tmp_path).stories["r1"]
    assert story.tokens == [*range(300), 5, 6]
    assert story.spans == [(0, "slot0", 3, "7", "aaaa"), (300, "slot0", 4, "7", "")]
    assert (story.reason, story.external_id, story.frames) == ("stop", "client-1", ROWS[0].frames)
    assert read(tmp_path).stories["r2"].reason == ""


def test_a_tail_torn_at_any_byte_keeps_all_whole_records(tmp_path: Path) -> None:
    journal(tmp_path).append(ROWS)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    ends, unpacker = [], msgpack.Unpacker(raw=True)
    unpacker.feed(data)
    for _ in unpacker:
        ends.append(unpacker.tell())
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        damage: list[str] = []
        assert len(list(records(path, damage))) == sum(end <= cut for end in ends)
        assert damage == []


@pytest.mark.parametrize("garbage", [b"\x00" * 64, b"\xc1", b"\x92\x00\xc4\x01a", b"\x92\x01\x02"])
def test_damage_ends_a_segment_and_is_named(tmp_path: Path, garbage: bytes) -> None:
    journal(tmp_path).append(ROWS[:2])
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(garbage)
    reading = read(tmp_path)
    assert len(reading.stories["r1"].tokens) == 300
    assert len(reading.damage) == 1
    assert path.name in reading.damage[0]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_never_read_as_a_record(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal(folder).append(ROWS)
    (path,) = segments(folder)
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    got = list(records(path, []))[1:]
    assert got == ROWS[: len(got)]


def test_segments_are_capped_and_each_begins_with_the_live_requests(tmp_path: Path) -> None:
    live: list[Record] = [Add("live", "x", (b"f" * 50,), 1.0), Tokens("live", 0, (1, 2, 3), "s", 0, "")]
    writer = journal(tmp_path, live, max_bytes=64 << 10)
    writer.append(live)
    for i in range(2000):
        writer.append([Add(f"r{i}", "", (b"f" * 100,), 1.0), Finish(f"r{i}", "stop", 0, 1.0)])
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 64 << 10
    assert len(segments(tmp_path)) > 2
    stories = read(tmp_path).stories
    assert stories["live"].tokens == [1, 2, 3]
    assert "r1999" in stories
    assert "r0" not in stories


def test_a_block_after_a_hole_is_never_spliced(tmp_path: Path) -> None:
    journal(tmp_path).append([ROWS[0], Tokens("r1", 0, (1, 2), "s", 0, ""), Tokens("r1", 5, (9,), "s", 0, "")])
    assert read(tmp_path).stories["r1"].tokens == [1, 2]


def test_a_bad_disk_is_counted_and_the_next_append_recovers(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    writer = journal(folder)
    folder.rmdir()
    writer.append(ROWS)
    assert writer.failures == 1
    assert "journal" in writer.last_error
    folder.mkdir()
    writer.append(ROWS)
    assert read(folder).stories["r1"].reason == "stop"


def test_live_requests_larger_than_a_segment_are_not_written_again_with_every_append(tmp_path: Path) -> None:
    """A thousand long prompts are more than a segment: it takes its share beside them, not instead of them."""
    live: list[Record] = [Add(f"r{i}", "", (b"f" * 1000,), 1.0) for i in range(200)]
    writer = journal(tmp_path, live, max_bytes=1 << 20)  # a segment: 128 KiB
    writer.append(live)
    before = writer.bytes_total
    for i in range(200):
        writer.append([Tokens("r0", i, (i,), "s", 0, "")])
    assert writer.bytes_total - before < 500_000, "the live ones once or twice, not 200 times"
    for i in range(2000):
        writer.append([Add(f"short{i}", "", (b"f" * 500,), 1.0), Finish(f"short{i}", "stop", 0, 1.0)])
    assert len(segments(tmp_path)) > 1
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 1 << 20


TOLD: list[Record] = [
    Add("live", "x", (b"frame",), 1.0, "mine", b"d", True),
    Tokens("live", 0, (1, 2, 3), "s", 0, "7", ((0, b"row"),)),
    Tokens("live", 3, (4, 5), "s", 1, "7"),
]


def test_a_beginning_torn_at_any_byte_forgets_nothing(tmp_path: Path) -> None:
    """A router that is killed while it begins a segment: the client has all tokens, and so has the one before."""
    journal(tmp_path, TOLD).append(TOLD)
    whole = read(tmp_path).stories["live"]
    assert whole.tokens == [1, 2, 3, 4, 5]
    journal(tmp_path, TOLD).append([Tokens("live", 5, (6,), "s", 1, "7")])
    _, path = segments(tmp_path)
    data = path.read_bytes()
    assert read(tmp_path).stories["live"].tokens == [1, 2, 3, 4, 5, 6]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        assert read(tmp_path).stories["live"] == whole


def test_other_tokens_in_the_place_of_known_ones_still_replace_them(tmp_path: Path) -> None:
    journal(tmp_path).append([*TOLD, Tokens("live", 4, (9,), "s", 2, "7")])
    story = read(tmp_path).stories["live"]
    assert story.tokens == [1, 2, 3, 4, 9]
    assert [span[:3] for span in story.spans] == [(0, "s", 0), (3, "s", 1), (4, "s", 2)]


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes: the write that would is done in part, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_does_not_fill_with_beginnings(tmp_path: Path) -> None:
    writer = journal(tmp_path, ROWS[:2])
    with full_at(100):
        for _ in range(20):
            writer.append(ROWS[:2])
    assert writer.failures == 20
    assert list(tmp_path.iterdir()) == []
    writer.append([ROWS[-1]])
    assert read(tmp_path).stories["r1"].reason == "error:incomplete", "what the full disk did not take is not made up"


@pytest.mark.parametrize("open_before", [True, False], ids=["inside a segment", "at its beginning"])
def test_a_full_disk_that_takes_beginnings_does_not_fill_with_them_either(tmp_path: Path, open_before: bool) -> None:
    """The head and what is live still fit, what is new does not. Once there is room again, nothing live is missing."""
    live: list[Record] = [Add("live", "x", (b"f",), 1.0, "mine", b"d", True)]
    writer = journal(tmp_path, live)
    if open_before:
        writer.append(live)
    with full_at(800):
        for at in range(50):
            tokens = tuple(range(100 * at, 100 * at + 100))
            live.append(Tokens("live", 100 * at, tokens, "s", 0, "7"))
            writer.append([live[-1], Add(f"r{at}", "", (b"f" * 900,), 1.0), Finish(f"r{at}", "stop", 0, 1.0)])
    assert writer.failures == 50
    assert len(segments(tmp_path)) <= 1
    before = read(tmp_path)
    assert before.damage == []
    assert [one for one in before.stories if one != "live"] == []
    writer.append([Tokens("live", 5000, (1, 2), "s", 0, "7")])
    after = read(tmp_path)
    assert after.damage == []
    assert after.stories["live"].tokens == [*range(5000), 1, 2]
    assert len(segments(tmp_path)) == 1


def test_the_segments_of_many_short_lives_are_bounded(tmp_path: Path) -> None:
    for _ in range(20):
        journal(tmp_path).append(ROWS[-1:])
    first = segments(tmp_path)[0]
    for at in range(MOST_SEGMENTS):
        first.with_name(f"{at:015d}-abcd-000001.mpk").write_bytes(first.read_bytes())
    journal(tmp_path).append(ROWS[-1:])
    assert len(segments(tmp_path)) == MOST_SEGMENTS
    assert first in segments(tmp_path), "the oldest go"


def test_segments_of_a_clock_that_was_set_back_come_after_those_before(tmp_path: Path) -> None:
    journal(tmp_path, TOLD).append(TOLD)
    (path,) = segments(tmp_path)
    ahead = path.rename(path.with_name(f"{10**14:015d}-abcd-000001.mpk"))
    journal(tmp_path, TOLD).append([Finish("live", "stop", 5, 2.0)])
    assert segments(tmp_path)[0] == ahead
    assert read(tmp_path).stories["live"].reason == "stop"


def test_reading_keeps_no_more_ended_requests_than_may_be_kept(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    for i in range(100):
        name = f"n{i}"
        writer.append([Add(name, "", (b"f" * 1000,), 1.0, name, b"d"), Finish(name, "stop", 0, 1.0)])
    writer.append([Add("live", "", (b"f" * 50_000,), 1.0, "live", b"d")])
    found = read(tmp_path, named_only=True, keep_bytes=16_000).stories
    assert list(found) == [*(f"n{i}" for i in range(90, 100)), "live"]


def test_live_records_are_what_the_journal_already_holds() -> None:
    core = Core(Limits(journal_every=2))
    core.step(ev.Register("a", 0, "w", "e"), 0.0)
    core.step(ev.Ready("a", 0, "w"), 0.0)
    core.step(ev.Add("r", (b"f",), "ext"), 0.0)
    for seq, (version, token) in enumerate([("1", 10), ("1", 11), ("2", 12), ("2", 13), ("2", 14)]):
        core.step(ev.Outputs("a", 0, "w", seq, (ev.Item("r", (token,)),), version), 0.0)
    assert core.live_records() == [
        ev.JournalAdd("r", "ext", (b"f",)),
        ev.JournalTokens("r", 0, (10, 11), "a", 0, "1"),
        ev.JournalTokens("r", 2, (12, 13), "a", 0, "2"),
    ]
