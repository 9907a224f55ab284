"""Loading, attaching, sharing and updating weights in the owner's memory, beside the plain ways in the same run.

``python -m benchmarks.owner [--quick] [--json FILE] [--plot FILE] [--gib N] [--root DIR]``

A random bf16 model of some GiB is written to disk and deleted afterwards. Every round runs every way once, so that a
change of the machine meets all of them. "cold": the files were dropped from the page cache before (posix_fadvise;
what the disk or a hypervisor keeps is beyond reach), "warm": they are in it. Times are milliseconds, so a ratio above 1
is better than the baseline.

- ``load_*``: files to a sealed, hashed model. Baselines: vLLM's own loader (no hash, one process each) and, as rows of
  their own, read(2) into a buffer that is used again and into fresh memory. ``digest``: hashing alone.
- ``attach``: a worker's map of a sealed model, without and with verification of every byte.
- ``memory_*``: PSS of two processes that have read all weights: shared from the owner, against a private copy each.
- ``update_*``: from the first byte to the sealed next version, the owner's own hash included (``commit`` apart).
  Baseline: a plain memcpy of the bytes that change.
- ``huge_*``: load and verified attach with and without huge pages, where the host has them.

Every load and version is verified by digest; a wrong one ends the run with exit code 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from belayer.clock import Stopwatch
from belayer.localhost import LocalHost
from belayer.messages.owner import Role
from benchmarks import owner_model as model
from benchmarks.report import Report, parser
from gpuowner import hugepages
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.digest import chunk_digests, default_threads, first_difference
from gpuowner.loader import Loaded, load
from gpuowner.tensors import HostTensor
from gpuowner.update import begin_update
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, Mapping

NAME = {"swap": "swapped", "in_place": "placed"}
DELTA = 0.01  # of all bytes
Samples = defaultdict[str, list[float]]


class WrongError(Exception):
    """A result that is not what it must be."""


def right(fact: bool, what: str) -> None:
    if not fact:
        raise WrongError(what)


def drop(loaded: Loaded) -> None:
    loaded.drop()


# --- loading ---


def one_load(folder: Path, digests: set[str], huge_pages: str = "off") -> tuple[float, Loaded]:
    watch = Stopwatch()
    loaded = load("bench", folder, "bfloat16", lambda *_: None, kept=folder / "kept", huge_pages=huge_pages)
    ms = watch.ms()
    digests.add(loaded.digest)
    right(len(digests) == 1, f"two loads of the same files have the digests {digests}")
    return ms, loaded


def loading(report: Report, folder: Path, files: list[Path], rounds: int) -> None:
    """All ways to read the files, cold and warm, interleaved."""
    seen: Samples = defaultdict(list)
    digests: set[str] = set()
    theirs = model.Theirs(folder)
    threads = default_threads()
    try:
        for _ in range(rounds):
            for state in ("cold", "warm"):
                for name in ("ours", "theirs", "read", "read_kept"):
                    if state == "cold":
                        model.forget(files)
                    seen[f"{name}_{state}"].append(_once(name, folder, files, digests, theirs, threads, seen))
    finally:
        theirs.close()
    size = sum(path.stat().st_size for path in files)
    for state in ("cold", "warm"):
        base = float(np.median(seen[f"theirs_{state}"]))
        ours = seen[f"ours_{state}"]
        report.add(f"load_{state}", "ms", ours, base, f"{rate(size, ours)}, hashed; baseline: vLLM's own loader")
        for name, what in (("read", f"into one buffer, {threads} threads"), ("read_kept", "into fresh memory")):
            values = seen[f"{name}_{state}"]
            report.add(f"{name}_{state}", "ms", values, None, f"{rate(size, values)}, read(2) {what}")
    report.add(
        "digest", "ms", seen["digest"], None, f"{rate(size, seen['digest'])}, sha256 on {threads} threads, alone"
    )


def _once(
    name: str, folder: Path, files: list[Path], digests: set[str], theirs: model.Theirs, threads: int, seen: Samples
) -> float:
    if name == "theirs":
        return theirs.load()
    if name == "read":
        return model.plain_read(files, threads)
    if name == "read_kept":
        return model.plain_read_kept(files)
    ms, loaded = one_load(folder, digests)
    watch = Stopwatch()
    assert loaded.mapping is not None, "a memfd is mapped by its owner"
    again = tuple(chunk_digests(loaded.mapping.buffer(), threads))
    seen["digest"].append(watch.ms())
    right(again == loaded.chunks, "the bytes differ from their digests")
    drop(loaded)
    return ms


def rate(nbytes: int, values: list[float]) -> str:
    return f"{nbytes / 1e3 / float(np.median(values)):,.0f} MB/s"


def huge(report: Report, folder: Path, rounds: int) -> None:
    """Load and verified map with each kind of page that this host has."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    modes = [mode for mode in hugepages.MODES if not hugepages.missing(size + hugepages.SIZE, mode)]
    seen: Samples = defaultdict(list)
    for _ in range(rounds):
        for mode in modes:
            ms, loaded = one_load(folder, set(), mode)
            seen[f"load_{mode}"].append(ms)
            fd = loaded.memory.reader_fd()
            watch = Stopwatch()
            reader = Mapping(fd, loaded.memory.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
            right(first_difference(reader.buffer(), loaded.chunks) is None, f"{mode}: a reader sees other bytes")
            seen[f"attach_{mode}"].append(watch.ms())
            reader.close()
            os.close(fd)
            drop(loaded)
    for mode in hugepages.MODES[1:]:
        for what in ("load", "attach"):
            if mode in modes:
                base = float(np.median(seen[f"{what}_off"]))
                report.add(f"huge_{what}_{mode}", "ms", seen[f"{what}_{mode}"], base, "warm; baseline: 4 KiB pages")
        if mode not in modes:
            why = hugepages.missing(size + hugepages.SIZE, mode)
            print(f"owner: huge pages ({mode}) not measured: {why}", file=sys.stderr)


# --- attaching and sharing ---

_READER = """
import os, sys
from pathlib import Path
from belayer.messages.owner import Role
from gpuowner.attach import OwnerClient, WeightsView
view = WeightsView(OwnerClient(Path(sys.argv[1]), Role.WORKER, "reader"), "swapped")
view.verify()
if sys.argv[2] == "private":
    kept = bytes(memoryview(view.mapping.buffer()).cast("B"))
    view.mapping.close()
print("ready", flush=True)
sys.stdin.readline()
rows = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
print(rows["Pss:"], flush=True)
sys.stdin.readline()
"""


def attaching(report: Report, path: Path, rounds: int) -> None:
    seen: Samples = defaultdict(list)
    size = 0
    for _ in range(rounds):
        client = OwnerClient(path, Role.WORKER, "bench", timeout=600.0)
        watch = Stopwatch()
        view = WeightsView(client, NAME["swap"])
        seen["attach_map"].append(watch.ms())
        view.verify()
        seen["attach_verified"].append(watch.ms())
        watch = Stopwatch()
        right(view.verify_version(default_threads()), "the owner has another version than it gave out")
        seen["verify_all_cores"].append(watch.ms())
        size = view.grant.nbytes
        view.mapping.close()
        client.close()
    report.add("attach_map", "ms", seen["attach_map"], None, "a sealed model mapped, nothing read")
    verified = seen["attach_verified"]
    report.add("attach_verified", "ms", verified, None, f"{rate(size, verified)}, every byte hashed on one core")
    cores = seen["verify_all_cores"]
    report.add("verify_all_cores", "ms", cores, None, f"{rate(size, cores)}, sha256 on {default_threads()} threads")


def sharing(report: Report, path: Path) -> None:
    """PSS of two readers at once: a main and its shadow."""
    sums = {}
    for kind in ("shared", "private"):
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", _READER, str(path), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for reader in readers:
            right(_line(reader) == "ready", f"a reader ({kind}) did not come up")
        sums[kind] = 0.0
        for reader in readers:
            _tell(reader)
            sums[kind] += int(_line(reader)) / 1024
        for reader in readers:
            _tell(reader)
            reader.wait()
    note = "PSS of two processes that have read all weights; baseline: a private copy each"
    report.add("memory_shared", "MiB", [sums["shared"]], sums["private"], note)


def _line(reader: subprocess.Popen[str]) -> str:
    assert reader.stdout is not None
    return reader.stdout.readline().strip()


def _tell(reader: subprocess.Popen[str]) -> None:
    assert reader.stdin is not None
    reader.stdin.write("\n")
    reader.stdin.flush()


# --- updating ---


def state(layout: dict[str, Any], bits: Any, share: float) -> dict[str, Any]:
    """New bf16 values for all tensors, or for those of the first layers up to ``share`` of all bytes."""
    rows = [spec for spec in layout.values() if spec.source and spec.nbytes]
    total, out, done = sum(spec.nbytes for spec in rows), {}, 0
    if share < 1:
        rows = [spec for spec in rows if ".layers." in spec.source]
    for spec in rows:
        if done >= share * total:
            break
        count = spec.nbytes // 2
        flat = bits[done // 2 % 4096 :][:count] if count <= bits.size - 4096 else np.resize(bits, count)
        out[spec.source] = HostTensor("BF16", spec.source_shape or spec.shape, flat)
        done += spec.nbytes
    return out


def updating(report: Report, path: Path, rounds: int) -> None:
    client = OwnerClient(path, Role.LOADER, "bench", timeout=600.0)
    view = WeightsView(OwnerClient(path, Role.WORKER, "bench", timeout=600.0), NAME["swap"])
    layout, size = view.tensors, view.grant.nbytes
    bits = np.random.default_rng(1).integers(0, 1 << 15, 80 << 20, dtype=np.uint16)
    seen: Samples = defaultdict(list)
    moved: dict[str, int] = {}
    for _ in range(rounds):
        for kind, share in (("whole", 1.0), ("delta", DELTA)):
            given = state(layout, bits, share)
            moved[kind] = sum(tensor.flat.nbytes for tensor in given.values())
            target = np.ones(moved[kind], dtype=np.uint8)
            seen[f"memcpy_{kind}"].append(_memcpy(target, given))
            del target
            for mode, name in NAME.items():
                ms, commit = _update(client, name, mode, given, whole=kind == "whole")
                seen[f"update_{mode}_{kind}"].append(ms)
                seen[f"commit_{mode}_{kind}"].append(commit)
    watch = Stopwatch()
    right(view.follow(default_threads()), "the reader had the last version already")
    report.add("follow", "ms", [watch.ms()], None, "a reader moves to the last version at its addresses, verified")
    view.mapping.close()
    for kind, nbytes in moved.items():
        base = float(np.median(seen[f"memcpy_{kind}"]))
        for mode in NAME:
            values = seen[f"update_{mode}_{kind}"]
            of_all = f"{nbytes / 1e6:,.0f} of {size / 1e6:,.0f} MB"
            note = f"{rate(nbytes, values)} ({of_all}); baseline: memcpy into memory in use"
            report.add(f"update_{mode}_{kind}", "ms", values, base, note)
            commits = seen[f"commit_{mode}_{kind}"]
            report.add(f"commit_{mode}_{kind}", "ms", commits, None, "of it: hash, seal, and the owner's own hash")


def _memcpy(target: Any, given: dict[str, Any]) -> float:
    watch, at = Stopwatch(), 0
    for tensor in given.values():
        part = tensor.flat.view(np.uint8)
        target[at : at + part.size] = part
        at += part.size
    return watch.ms()


def _update(client: OwnerClient, name: str, mode: str, given: dict[str, Any], *, whole: bool) -> tuple[float, float]:
    watch = Stopwatch()
    update = begin_update(client, name, mode=mode, whole=whole)
    update.write(given)
    written = watch.ms()
    info = update.commit()
    right(info.state == "sealed" and info.version == update.version, f"{name} ended {info.state} v{info.version}")
    return watch.ms(), watch.ms() - written


def config(folder: Path) -> str:
    rows = [
        f'[[model]]\nname = "{name}"\npath = "{folder}"\ndtype = "bfloat16"\nupdate = "{mode}"\n'
        for mode, name in NAME.items()
    ]
    return "".join(rows) + '[[slot]]\nname = "slot0"\nmodel = "swapped"\n'


def run(report: Report, arguments: Namespace, scratch: Path) -> None:
    rounds = 1 if arguments.quick else arguments.rounds
    folder = scratch / "model"
    files = model.make(folder, arguments.gib)
    loading(report, folder, files, rounds)
    huge(report, folder, rounds)
    with LocalHost(scratch / "h", config(folder)) as host:
        host.start(("gpuowner@weights",))
        host.wait("the owner", lambda: host.owner_answers("weights"), 600)
        path = host.paths.owner_sock("weights")
        attaching(report, path, rounds)
        sharing(report, path)
        updating(report, path, rounds)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--gib", type=float, default=None, help="size of the model (default 3, quick 0.4)")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--root", type=Path, default=Path("/var/tmp"), help="folder for the model, deleted afterwards")
    arguments = options.parse_args()
    arguments.gib = arguments.gib or (0.4 if arguments.quick else 3.0)
    scratch = Path(tempfile.mkdtemp(prefix="bl-own-", dir=arguments.root))
    report = Report("owner", versions={"model_gib": str(arguments.gib)})
    try:
        run(report, arguments, scratch)
    except WrongError as why:
        print(f"owner: WRONG RESULT: {why}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch)
    report.write(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
