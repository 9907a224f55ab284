"""Every single bad sign makes a GPU unhealthy by its name; what a device does not offer is no sign (promise R5)."""

from __future__ import annotations

import msgspec
import pytest

from belayerd.health import (
    RECOVERY_ACTIONS,
    XIDS,
    Answer,
    Check,
    Outcome,
    Sample,
    State,
    XidClass,
    judge,
    xid_class,
)


def ok(*values: int) -> Answer:
    return Answer(State.ANSWERED, values)


WELL = Sample(recovery_action=ok(0), xids=ok(), ecc=ok(3), remapped_rows=ok(0, 0), nvlink=ok(17, 1))
PROBED = Answer(State.ANSWERED, said="0.1 ms")
FIELDS = {check: check.value if check is not Check.XID else "xids" for check in Check if check is not Check.PROBE}


def with_(check: Check, answer: Answer) -> tuple[Sample, Answer]:
    if check is Check.PROBE:
        return WELL, answer
    return msgspec.structs.replace(WELL, **{FIELDS[check]: answer}), PROBED


def test_a_well_device_is_healthy_and_every_check_was_made() -> None:
    verdict = judge(WELL, WELL, PROBED)
    assert verdict.healthy
    assert [row.check for row in verdict.readings] == list(Check)
    assert {row.outcome for row in verdict.readings} == {Outcome.OK}
    assert not verdict.full_checksum
    assert set(WELL.__struct_fields__) == set(FIELDS.values()), "no answer goes unjudged"


@pytest.mark.parametrize("state", [State.LOST, State.TIMEOUT, State.FAILED])
@pytest.mark.parametrize("check", list(Check))
def test_no_good_answer_to_a_single_check_is_unhealthy_by_its_name(check: Check, state: State) -> None:
    after, probe = with_(check, Answer(state, said="GPU is lost"))
    verdict = judge(WELL, after, probe)
    assert verdict.reasons == (f"{check.value}: GPU is lost",)
    outcome = Outcome.TIMEOUT if state is State.TIMEOUT else Outcome.BAD
    assert [row.check for row in verdict.readings if row.outcome is outcome] == [check]


@pytest.mark.parametrize("check", list(FIELDS))
def test_not_supported_is_no_failure(check: Check) -> None:
    after, probe = with_(check, Answer(State.NOT_SUPPORTED))
    verdict = judge(WELL, after, probe)
    assert verdict.healthy
    assert check.value in verdict.describe().partition("not offered")[2]


def test_a_probe_that_cannot_run_is_a_failure() -> None:
    assert judge(WELL, WELL, Answer(State.NOT_SUPPORTED, said="no warm context")).reasons == ("probe: no warm context",)


BAD: list[tuple[Check, Answer, str]] = [
    *[(Check.RECOVERY_ACTION, ok(number), name) for number, name in RECOVERY_ACTIONS.items() if number],
    (Check.RECOVERY_ACTION, ok(99), "action 99"),
    *[(Check.XID, ok(number), str(number)) for number in (48, 62, 63, 64, 74, 79, 92, 95, 119, 120, 140, 7, 999)],
    (Check.XID, ok(13, 31, 79, 45), "79"),
    (Check.ECC, ok(4), "1 new uncorrected"),
    (Check.ECC, ok(2), "went back"),
    (Check.REMAPPED_ROWS, ok(1, 0), "waits for a reset"),
    (Check.REMAPPED_ROWS, ok(0, 1), "failed"),
    (Check.NVLINK, ok(18, 1), "1 new receive"),
    (Check.NVLINK, ok(17, 2), "1 more links are down"),
]


@pytest.mark.parametrize(("check", "answer", "said"), BAD, ids=lambda value: str(value)[:40])
def test_every_bad_value_alone_is_unhealthy_by_its_name(check: Check, answer: Answer, said: str) -> None:
    after, probe = with_(check, answer)
    (reason,) = judge(WELL, after, probe).reasons
    assert reason.startswith(f"{check.value}: ")
    assert said in reason


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_worker_local_xids_leave_the_device_to_its_probe(number: int) -> None:
    after, _ = with_(Check.XID, ok(number))
    assert xid_class(number) is XidClass.WORKER_LOCAL
    assert judge(WELL, after, PROBED).healthy
    assert not judge(WELL, after, Answer(State.TIMEOUT)).healthy, "the number alone is never trusted"


def test_a_contained_memory_error_asks_for_every_digest() -> None:
    after, _ = with_(Check.XID, ok(45, 94))
    verdict = judge(WELL, after, PROBED)
    assert verdict.healthy
    assert verdict.full_checksum


def test_a_changed_recovery_action_is_judged_by_the_action() -> None:
    after = msgspec.structs.replace(WELL, xids=ok(154))
    assert judge(WELL, after, PROBED).healthy
    worse = msgspec.structs.replace(after, recovery_action=ok(1))
    assert judge(WELL, worse, PROBED).reasons == ("recovery_action: the driver asks for: GPU reset",)


def test_every_number_has_a_class() -> None:
    local = {number for number in range(300) if xid_class(number) is XidClass.WORKER_LOCAL}
    assert local == {13, 31, 43, 45, 68, 109}
    assert {number for number in range(300) if xid_class(number) is XidClass.CONTAINED} == {94}
    assert {number for number in range(300) if xid_class(number) is XidClass.ACTION} == {154}
    assert all(name for _, name in XIDS.values())


def test_counters_that_could_not_be_read_before_start_at_zero() -> None:
    before = msgspec.structs.replace(WELL, ecc=Answer(State.NOT_SUPPORTED))
    assert judge(before, WELL, PROBED).reasons == ("ecc: 3 new uncorrected errors",)
