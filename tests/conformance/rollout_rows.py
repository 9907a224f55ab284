"""Failures of rollouts that users of other systems report, each with the tests that try it here, or why none does.

``docs/conformance-rollouts.md`` is written from this table (``python docs/rollouts.py``); tests see that both agree
and that every test named here exists. Numbers are those of the list that the rows came from; some have been merged.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST, FAULTS, UPDATES = "tests/e2e/test_host.py", "tests/e2e/test_pair_faults.py", "tests/e2e/test_weight_updates.py"
WORKER, REUSE, SOAK = "tests/e2e/test_worker.py", "tests/e2e/test_kv_reuse.py", "tests/e2e/test_soak.py"
ROUTER, TABLE = "tests/e2e/test_router_worker.py", "tests/tables/test_pair_table.py"
HERE, GPU = "tests/conformance/test_rollout_workers.py", "tests/conformance/test_rollout_gpu.py"
UNPARK = "tests/conformance/test_rollout_gpu_unpark.py"
FRONT, RANKS = "tests/conformance/test_rollout_router.py", "tests/e2e/test_tensor_parallel.py"
LEAKS, SURVIVAL = "tests/process/test_gpuowner_leaks.py", "tests/process/test_gpuowner_survival.py"

_SOAK = f"{SOAK}::test_no_false_alarm_and_no_missed_fault"
_GATE = f"{FAULTS}::test_a_shadow_that_fails_a_gate_never_serves"
_CUTS = f"{ROUTER}::test_every_feature_goes_on_at_every_cut"
_EVERY = f"{HOST}::test_every_stream_outlives_every_main"


@dataclass(frozen=True)
class Row:
    """``thread``: below https://github.com/. ``tests``: node ids without parameters. ``why``: what they show, or why
    there is none."""

    number: str
    thread: str
    symptom: str
    tests: tuple[str, ...]
    why: str


ROWS: tuple[Row, ...] = (
    Row(
        "1",
        "vllm-project/vllm/issues/55510",
        "front end killed, engine lives on and holds its memory",
        (
            "tests/unit/test_procs.py::test_a_whole_tree_is_seen_dead",
            "tests/unit/test_procs.py::test_a_tree_that_outlives_its_leader_is_found",
            f"{HOST}::test_router_is_killed_and_told_again_who_serves",
            f"{HOST}::test_nothing_of_dead_workers_is_left",
        ),
        "the front end is another process, whose death costs no engine; a fence kills the whole tree and sees it dead",
    ),
    Row(
        "2",
        "vllm-project/vllm/issues/16259",
        "workers crashed, /health still 200",
        (f"{RANKS}::test_the_group_fails_over_as_one", _EVERY, f"{TABLE}::test_kill_hands_over_and_re_arms"),
        "death is seen by pidfd and not by a probe; status is unprotected until a shadow is ready",
    ),
    Row(
        "4",
        "vllm-project/vllm/issues/27313",
        "one rank stopped, the others wait in a step for it",
        (
            f"{RANKS}::test_the_group_fails_over_as_one",
            _SOAK,
        ),
        "a step that never ends is a hang by the age of the beat, whatever it waits for",
    ),
    Row(
        "5",
        "vllm-project/vllm/issues/47249",
        "8 s first compile gets a worker killed",
        (_SOAK,),
        "a stall inside an announced phase: no handover",
    ),
    Row(
        "6",
        "sgl-project/sglang/issues/34586",
        "363 s cold compile, 300 s watchdog",
        (_SOAK,),
        "announced: nothing happens; the control, the same stall unannounced: found",
    ),
    Row(
        "7",
        "ai-dynamo/dynamo/pull/14735",
        "4 s probe kills an engine in its first compile",
        (_SOAK,),
        "bursts, longest prefills, updates, hogs, pauses: zero false alarms",
    ),
    Row(
        "8",
        "modal-projects/training-gym/pull/307",
        "cold engine killed before its first answer",
        (
            f"{HERE}::test_row_8_a_slow_start_is_no_hang",
            "tests/tables/test_policy.py::test_before_the_first_beat_the_start_deadline_rules",
        ),
        "a start that stands still for many hang limits becomes the shadow",
    ),
    Row(
        "10",
        "ray-project/ray/issues/61263",
        "ping answers while the user's path is stuck",
        (f"{FAULTS}::test_a_loop_that_makes_no_step_is_handed_over", _SOAK),
        "steps are counted, and the beat is the loop's own",
    ),
    Row(
        "12",
        "ai-dynamo/dynamo/issues/8599",
        "restarted engine waits for ever on the failover lock",
        (
            f"{HERE}::test_rows_12_26_and_45_each_relaunch_is_a_standby_and_takes_the_next_fault",
            f"{HOST}::test_a_main_that_dies_while_its_owners_are_away_is_handed_over_when_they_are_back",
        ),
        "a relaunch is a standby; what it waits for has a deadline",
    ),
    Row(
        "14",
        "ai-dynamo/dynamo/pull/6945",
        "wake fails and the endpoint is registered all the same",
        (_GATE, f"{UNPARK}::test_rows_14_15_and_37_an_unpark_that_fails_is_said_and_the_worker_never_serves"),
        "every step before `register`, failing in turn",
    ),
    Row(
        "15",
        "ai-dynamo/dynamo/pull/7681",
        "errors of sleep and wake swallowed",
        (
            f"{HERE}::test_row_15_an_unpark_that_fails_is_exit_1_and_says_so",
            f"{UNPARK}::test_rows_14_15_and_37_an_unpark_that_fails_is_said_and_the_worker_never_serves",
        ),
        "exit status 1, incident and status name the step",
    ),
    Row(
        "16",
        "ai-dynamo/dynamo/pull/10319",
        "missed hook after wake: illegal access",
        (_GATE, f"{TABLE}::test_order_of_the_steps_is_the_protocol"),
        "one token is computed on the real arena before `register`",
    ),
    Row(
        "17",
        "ai-dynamo/dynamo/pull/8245",
        "CUDA and NVML count devices differently",
        (f"{GPU}::test_row_17_a_worker_on_another_device_than_its_slot_is_refused",),
        "devices are compared by UUID; simulated only",
    ),
    Row(
        "18",
        "ai-dynamo/dynamo/pull/7930",
        "migration inside guided decoding: broken JSON",
        (_CUTS, f"{WORKER}::test_a_grammar_continues_where_it_was"),
        "the grammar takes the tokens that were made, at every cut",
    ),
    Row(
        "19",
        "ai-dynamo/dynamo/pull/14378",
        "text withheld for a stop string is lost",
        (_CUTS,),
        "cut inside the stop string, too",
    ),
    Row(
        "22",
        "ai-dynamo/dynamo/issues/984",
        "random state is not carried over",
        (f"{WORKER}::test_resume_is_exact_at_every_cut", _EVERY),
        "seeded requests at cuts; seeds count by position",
    ),
    Row(
        "23",
        "RBLN-SW/vllm-rbln/pull/1025",
        "seed and chunked prefill raise in the CPU generator",
        (f"{WORKER}::test_a_seeded_request_survives_a_chunked_prefill",),
        "tokens equal to the unchunked ones",
    ),
    Row(
        "24",
        "ai-dynamo/dynamo/pull/14586",
        "KV content across a crash",
        (
            f"{REUSE}::test_random_kills_with_a_small_arena",
            f"{REUSE}::test_control_published_while_scheduling_the_same_kill_is_seen",
        ),
        "adopted after the fence only, with a control that fails",
    ),
    Row(
        "26",
        "vllm-project/vllm/issues/16564",
        "garbage after wake",
        (
            f"{HERE}::test_rows_12_26_and_45_each_relaunch_is_a_standby_and_takes_the_next_fault",
            f"{GPU}::test_rows_26_and_53_twenty_parks_give_the_same_bytes_at_the_same_addresses_over_cuda",
        ),
        "same tokens after every takeover; twenty parks byte for byte (simulated device)",
    ),
    Row(
        "27",
        "vllm-project/vllm/issues/52479",
        "weights of a draft model not restored",
        (),
        "no draft models: nothing outside the owner's memory is dropped at a park, so nothing has to be restored",
    ),
    Row(
        "28",
        "NVIDIA-NeMo/RL/issues/2631",
        "buffers corrupt after sleep",
        (f"{GPU}::test_row_28_parameters_are_the_owners_bytes_and_buffers_are_private_over_cuda",),
        "buffers are private copies and never parked",
    ),
    Row(
        "29",
        "vllm-project/vllm/pull/57854",
        "update while asleep segfaults",
        (
            f"{UPDATES}::test_a_stream_goes_on_over_an_update_and_back",
            f"{UNPARK}::test_row_29_nothing_runs_on_a_parked_standby",
        ),
        "a CPU standby follows in place; a parked one refuses by name",
    ),
    Row(
        "30",
        "vllm-project/vllm/issues/48312",
        "stale parameters after a reload",
        (f"{UPDATES}::test_a_main_killed_around_an_update_leaves_whole_weights",),
        "killed before, inside and after: the promoted one answers as the sealed version",
    ),
    Row(
        "32",
        "sgl-project/sglang/pull/28089",
        "leaked segments fill /dev/shm, SIGBUS",
        (f"{HERE}::test_row_32_a_full_dev_shm_is_nothing_to_a_worker",),
        "every test of that file runs with a full one",
    ),
    Row(
        "33",
        "ovg-project/kvcached/issues/477",
        "SIGTERM leaks memory, stale block hashes",
        (
            f"{LEAKS}::test_nothing_is_left_of_fifty_kills",
            f"{SURVIVAL}::test_a_stopped_owner_is_released_and_holds_nothing",
            f"{REUSE}::test_killed_before_the_forward_pass_the_block_is_not_used",
        ),
        "memfds have no names to leak; blocks carry version, epoch and seed",
    ),
    Row(
        "35",
        "sgl-project/sglang/issues/25811",
        "client's 4xx opens the circuit breaker",
        ("tests/process/test_router_input.py::test_a_mistake_is_a_4xx_counted_apart",),
        "counted apart; no worker is blamed",
    ),
    Row(
        "37",
        "llm-d-incubation/llm-d-fast-model-actuation/issues/629",
        "routes to what is not ready; no memory at wake",
        (
            _GATE,
            f"{UNPARK}::test_row_37_no_room_at_first_is_tried_again_until_the_fenced_main_has_given_its_memory_back",
        ),
        "registered after the oracle only",
    ),
    Row(
        "40",
        "verl-project/verl/pull/6029",
        "per-token arrays doubled on resume",
        (
            f"{FRONT}::test_rows_40_41_every_array_of_a_resumed_answer_is_as_long_as_its_tokens",
            _CUTS,
        ),
        "tokens, logprobs, usage as in the unfailed run",
    ),
    Row(
        "41",
        "THUDM/slime/issues/1440",
        "wrong lengths after a partial rollout",
        (
            f"{FRONT}::test_rows_40_41_every_array_of_a_resumed_answer_is_as_long_as_its_tokens",
            _CUTS,
        ),
        "as above",
    ),
    Row(
        "42",
        "THUDM/slime/pull/2092",
        "weight versions mixed inside one sample",
        (
            f"{FRONT}::test_row_42_a_sample_of_two_weight_versions_says_which_token_is_of_which",
            f"{UPDATES}::test_a_stream_goes_on_over_an_update_and_back",
        ),
        "each chunk names the version of its tokens",
    ),
    Row(
        "44",
        "NVIDIA-NeMo/RL/pull/3589",
        "failed generation counted as zero reward",
        (
            f"{FRONT}::test_row_44_a_generation_that_failed_is_an_error_and_no_empty_text",
            "tests/process/test_router_return.py::test_what_cannot_be_is_a_typed_error",
            "tests/process/test_router_return.py::test_what_becomes_of_a_stream_whose_worker_dies_is_its_wish",
        ),
        "an error object, never an empty text",
    ),
    Row(
        "45",
        "NVIDIA-NeMo/RL/pull/3592",
        "restarted shard is never admitted again",
        (f"{HERE}::test_rows_12_26_and_45_each_relaunch_is_a_standby_and_takes_the_next_fault",),
        "four deaths in a row",
    ),
    Row(
        "49",
        "vllm-project/vime/pull/168",
        "weights change while a step is in flight",
        (f"{UPDATES}::test_a_stream_goes_on_over_an_update_and_back", _SOAK),
        "mains are paused between two steps first",
    ),
    Row(
        "50",
        "PrimeIntellect-ai/prime-rl/pull/2325",
        "pause deadlocks while one rank is idle",
        (f"{HERE}::test_row_50_a_pause_holds_with_one_engine_idle",),
        "one engine busy, one idle, for longer than any limit of the watcher",
    ),
    Row(
        "51",
        "huggingface/trl/issues/6797",
        "weight sync hangs when a member died",
        (
            "tests/e2e/test_trainer_group.py::test_row_51_main_killed_inside_an_update_and_the_group_is_made_anew",
            f"{RANKS}::test_row_51_a_trainer_updates_a_group_one_of_whose_ranks_dies_inside",
        ),
        "the trainer is told, and makes its group anew",
    ),
    Row(
        "52",
        "NovaSky-AI/SkyRL/issues/1613",
        "one dead engine ends the run",
        (
            f"{FRONT}::test_row_52_one_of_four_engines_dies_for_good_and_the_run_goes_on",
            _EVERY,
            f"{HOST}::test_second_failure_in_the_window_quarantines_and_requests_move",
        ),
        "requests resume or move",
    ),
    Row(
        "52d",
        "guoriyue/VRL/pull/15",
        "health thread answers while the real call is stuck",
        (_SOAK, "tests/unit/test_worker_heart.py::test_a_long_prefill_announces_a_deadline_by_its_tokens"),
        "only the loop beats: a step that blocks is found",
    ),
    Row(
        "53",
        "sgl-project/sglang/pull/32718",
        "graph pool discarded at a pause",
        (f"{GPU}::test_rows_26_and_53_twenty_parks_give_the_same_bytes_at_the_same_addresses_over_cuda",),
        "simulated device; replay on a GPU is not tried",
    ),
    Row(
        "54",
        "fzyzcjy/torch_memory_saver/issues/88",
        "resume hangs, pause frees nothing",
        (
            f"{GPU}::test_row_54_parking_gives_every_byte_back_to_the_device",
            f"{GPU}::test_row_54_settings_that_make_parking_unsafe_are_refused",
        ),
        "simulated device",
    ),
    Row(
        "55",
        "pytorch/pytorch/issues/145703",
        "IPC memory never freed",
        (f"{GPU}::test_row_55_a_hundred_attachments_leave_nothing_behind",),
        "simulated device",
    ),
    Row(
        "56",
        "THUDM/slime/pull/1731",
        "memory grows with each weight update",
        (
            f"{HERE}::test_row_56_many_updates_leave_no_descriptor_and_no_memory",
            f"{LEAKS}::test_nothing_is_left_of_fifty_kills",
        ),
        "100 updates: descriptors equal, less than one version more",
    ),
    Row(
        "57",
        "vllm-project/vllm/pull/44428",
        "any worker's death ends the whole engine",
        (f"{HERE}::test_row_57_any_worker_may_die_and_no_request_notices", _EVERY),
        "`make demo`",
    ),
)


def render() -> str:
    head = "| # | thread | symptom | tests | what they show |\n|---|---|---|---|---|"
    lines = [
        f"| {row.number} | [{row.thread.split('/')[1]}](https://github.com/{row.thread}) | {row.symptom} | "
        f"{'<br>'.join(f'`{test}`' for test in row.tests) or 'none'} | {row.why} |"
        for row in ROWS
    ]
    said = "Generated by `python docs/rollouts.py` from `tests/conformance/rollout_rows.py`; do not edit."
    return "\n".join(["# Rollout failures that users of other systems report", "", said, "", head, *lines, ""])
