"""One TOML for all daemons of a host, checked as a whole at the start.

Unknown keys are refused; timing inequalities are stated and refused, never adjusted. Every error is one sentence
that names the file, the key and the reason. ``belayerctl config check`` runs this same code.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from belayer import config_sense
from belayer.errors import ConfigInvalid
from belayer.ids import is_name
from belayer.model_shape import undivided

Positive = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(gt=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Text = Annotated[str, Meta(min_length=1)]
Egress = Annotated[str, Meta(pattern=r"^[0-9.]+(/[0-9]{1,2})?:[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp))?$")]


_GRANULE = 2 << 20  # bytes; cuMemGetAllocationGranularity of every GPU so far
_DEVICE = re.compile(r"cpu|gpu(:(\d+|GPU-[0-9a-fA-F-]+))?")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Host(_Section, frozen=True, kw_only=True):
    """``name`` is how other hosts and the status know this one."""

    name: str = "host0"


class Gpuowner(_Section, frozen=True, kw_only=True):
    """``memory``: where weights and arenas live: "memfd" for slots on the CPU, "cuda_vmm" for slots on a GPU.
    ``huge_pages``: of weights in memfd: "thp" needs shmem_enabled, "hugetlb" a reserved pool; asked for and not there,
    the owner refuses to start."""

    memory: Literal["memfd", "cuda_vmm"] = "memfd"
    huge_pages: Literal["off", "thp", "hugetlb"] = "off"


class Model(_Section, frozen=True, kw_only=True):
    """``path``: a Hugging Face directory with config.json and safetensors; relative to this file.
    ``dtype``: what the engine computes in; bf16 files are widened exactly. ``update``: "swap" writes the next version
    beside the last one (twice the memory during an update; a version can never be written again), "in_place" over
    it."""

    name: str
    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    update: Literal["swap", "in_place"] = "swap"


class Slot(_Section, frozen=True, kw_only=True):
    """One engine. ``hang_limit_s``: silence of the scheduler loop that counts as a hang, outside announced phases.
    ``device``: "cpu", or "gpu", "gpu:INDEX", "gpu:UUID" as nvidia-smi -L lists them. ``kv_bytes``: size of the KV
    arena. ``kv_reuse``: a new main goes on with the KV blocks that the killed one had finished, instead of computing
    the context again; it trusts that a main which died wrote no wrong numbers before. ``spare``: takes no requests
    until a slot of the same model is quarantined, and then takes its place. ``tensor_parallel``: processes that hold
    and compute a part of the model each, on the CPU; ``kv_bytes`` is then that of one of them. ``packed_weights``: on
    the CPU, each worker also packs the matrices into private memory, as vLLM's own engine does: with float32 faster
    from two requests at once on, but main and shadow then hold the model twice more between them. ``url_port``: a port
    of the router's host that looks like this engine alone (0: none). ``on_death``: as router.on_death, for requests on
    this slot."""

    name: str
    model: str
    device: str = "cpu"
    kv_bytes: PositiveInt = 256 << 20
    block_size: PositiveInt = 32
    max_model_len: PositiveInt = 2048
    max_num_batched_tokens: PositiveInt = 2048
    max_num_seqs: PositiveInt = 64
    threads: PositiveInt = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=16)] = 1
    kv_reuse: bool = False
    packed_weights: bool = False
    spare: bool = False
    hang_limit_s: Positive = 2.0
    start_deadline_s: Positive = 180.0
    on_death: Literal["", "resume", "abort", "error"] = ""
    url_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class Router(_Section, frozen=True, kw_only=True):
    """``journal_every``: tokens of one request between two journal records (the paper's k = 256).
    ``request_deadline_s``: how long an interrupted or new request may wait without a worker; ``silence_s``: how long a
    worker may have one without a word; ``link_silence_s``: how long a worker or a front may not answer;
    ``read_deadline_s``: how long a client may take to send a request; ``write_deadline_s``: how long it may take
    nothing of an answer that waits for it. ``journal_sync``: when the disk is waited for.
    ``same_id``: a second request with the id of a running one is refused, or hears the same stream. ``on_death``: what
    becomes of requests whose worker dies and who say nothing. ``tool_parser``, ``reasoning_parser``: vLLM's names of
    them for this model ("": no tool calls, no reasoning). ``reasoning_start``, ``reasoning_end``: the text that opens
    the thinking and the one that is forced when thinking_token_budget is used up ("": those of the parser). ``fronts``:
    processes that answer on the ports; 1: the router itself does."""

    host: Text = "127.0.0.1"
    port: Port = 8000
    journal_every: PositiveInt = 256
    journal_max_mb: PositiveInt = 512
    journal_sync: Literal["never", "finish", "always"] = "never"
    keep_finished_mb: PositiveInt = 64
    same_id: Literal["refuse", "attach"] = "refuse"
    on_death: Literal["resume", "abort", "error"] = "resume"
    request_deadline_s: Positive = 120.0
    silence_s: Positive = 300.0
    link_silence_s: Positive = 30.0
    read_deadline_s: Positive = 30.0
    write_deadline_s: Positive = 900.0
    max_body_mb: PositiveInt = 64
    max_requests: PositiveInt = 4096
    deaths_per_request: PositiveInt = 2
    tool_parser: str = ""
    reasoning_parser: str = ""
    reasoning_start: str = ""
    reasoning_end: str = ""
    fronts: Annotated[int, Meta(ge=1, le=64)] = 1

    def thinks(self) -> bool:
        """Whether engines know where thinking begins and ends."""
        return bool(self.reasoning_parser or (self.reasoning_start and self.reasoning_end))


class Fleet(_Section, frozen=True, kw_only=True):
    """Routers of several hosts share their slots. ``listen``: ADDRESS:PORT for peers ("": no fleet); ``keys``: the
    folder of the CURVE keys (belayerctl keys), relative to this file. Seconds by each host's own clock: ``beat_s``
    between two questions to a peer; an answer later than ``slow_s`` stops new requests to it; none for ``lost_s``, and
    its requests go elsewhere; a peer silent for ``orphan_s`` loses what runs here for it."""

    listen: str = ""
    keys: Text = "keys"
    beat_s: Positive = 0.5
    slow_s: Positive = 1.0
    lost_s: Positive = 5.0
    orphan_s: Positive = 10.0


class Peer(_Section, frozen=True, kw_only=True):
    """Another host of the fleet: its ``host.name``, and the ADDRESS:PORT that it listens at. Its public key is in the
    folder of the keys under the same name."""

    name: str
    address: Text


class Envkeeper(_Section, frozen=True, kw_only=True):
    """Limits are per sandbox; bytes, seconds, MiB as named. ``criu``: the binary, version 4.2 or later.
    ``engine_path``: who dumps and restores; "docker_api" is the slow fallback (experimental dockerd before 28).
    ``disk_mb``: of the upper layer, looked at once a second while it acts; 0 for none. ``pool``: sandboxes of the
    configured image that wait, ready made. ``egress``: what sandboxes may be allowed at most, as
    ADDRESS[/BITS]:PORT[-PORT][/tcp|udp]; ``bridge``: the Docker network of those that are allowed something.
    ``disk_budget_mb``: of all checkpoints (0: none); above it the oldest go down to ``disk_low_mb`` (0: 80 % of it).
    ``restore_timeout_s``: how long a restored sandbox may take to answer, after at most twice that for its restore.
    ``checkpoint_ttl_s``: age at which a checkpoint goes that no living sandbox has READY (0: never).
    ``encrypt_key_file``: 32 bytes or 64 hex digits, or env:NAME; checkpoints are then sealed on disk."""

    enabled: bool = True
    image: Text = "belayer-sandbox:base"
    docker: Text = "unix:///var/run/docker.sock"
    criu: Text = "/opt/belayer/criu/usr/sbin/criu"
    runtime: Text = "belayer"
    engine_path: Literal["fast", "docker_api"] = "fast"
    memory_mb: PositiveInt = 512
    cpus: Positive = 1.0
    pids: PositiveInt = 256
    disk_mb: Annotated[int, Meta(ge=0)] = 0
    hostname: Text = "sandbox"
    pool: Annotated[int, Meta(ge=0)] = 0
    egress: tuple[Egress, ...] = ()
    bridge: Text = "bridge"
    action_timeout_s: Positive = 60.0
    checkpoint_timeout_s: Positive = 60.0
    restore_timeout_s: Positive = 60.0
    max_output_bytes: PositiveInt = 1 << 20
    keep_checkpoints: PositiveInt = 4
    disk_budget_mb: Annotated[int, Meta(ge=0)] = 0
    disk_low_mb: Annotated[int, Meta(ge=0)] = 0
    checkpoint_ttl_s: Annotated[float, Meta(ge=0)] = 0.0
    encrypt_key_file: str = ""


class Policy(_Section, frozen=True, kw_only=True):
    """``repeat_window_s``: a second failure this soon after a handover means hardware (promise R7).
    ``restart_budget``: failed starts of a shadow in a row before the slot is left unprotected and says so.
    ``owner_deadline_s``: how long an owner that does not answer yet (it loads, or verifies what it holds) may stand
    still; while it gets on, handovers and starts wait for it, however long that takes. ``follow_deadline_s``: likewise
    of a worker that verifies and maps the next weight version.
    ``alert_command``: program and arguments to run at an alert, which it finds as JSON on its standard input.
    ``on_replaced_command``: the same for each main that took the place of another, before the next weight update; its
    exit code 0 acknowledges, else it is run again."""

    repeat_window_s: Positive = 60.0
    fence_deadline_s: Positive = 10.0
    step_deadline_s: Positive = 10.0
    poll_s: Positive = 0.02
    restart_budget: PositiveInt = 3
    restart_backoff_s: Positive = 1.0
    owner_deadline_s: Positive = 120.0
    follow_deadline_s: Positive = 120.0
    alert_command: tuple[Text, ...] = ()
    on_replaced_command: tuple[Text, ...] = ()


class Config(_Section, frozen=True, kw_only=True):
    host: Host = Host()
    gpuowner: Gpuowner = Gpuowner()
    model: tuple[Model, ...] = ()
    slot: tuple[Slot, ...] = ()
    router: Router = Router()
    fleet: Fleet = Fleet()
    peer: tuple[Peer, ...] = ()
    envkeeper: Envkeeper = Envkeeper()
    policy: Policy = Policy()

    def slot_named(self, name: str) -> Slot:
        return next(slot for slot in self.slot if slot.name == name)

    def model_named(self, name: str) -> Model:
        return next(model for model in self.model if model.name == name)

    def ranks_of(self, model: str) -> int:
        """Parts that a model's weights lie in: the tensor_parallel of its slots, which is checked to be one."""
        return next((slot.tensor_parallel for slot in self.slot if slot.model == model), 1)


SECTIONS: dict[str, type[_Section]] = {
    "host": Host,
    "gpuowner": Gpuowner,
    "model": Model,
    "slot": Slot,
    "router": Router,
    "fleet": Fleet,
    "peer": Peer,
    "envkeeper": Envkeeper,
    "policy": Policy,
}


_LISTS = ("model", "slot", "peer")


def load(path: Path) -> Config:
    """Read and check ``path``; model paths come back absolute. Raises ConfigInvalid."""
    try:
        text = path.read_bytes()
    except OSError as why:
        raise ConfigInvalid(
            f"{path}: cannot be read: {why.strerror}",
            remedy="write it; a daemon takes another with --config FILE, every program another root with BELAYER_ROOT",
        ) from why
    try:
        table: Any = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise ConfigInvalid(f"{path}: not TOML: {why}") from why
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as why:
        raise ConfigInvalid(f"{path}: {_say(str(why))}") from why
    models = tuple(_absolute(path, model) for model in config.model)
    fleet = msgspec.structs.replace(config.fleet, keys=str((path.parent / config.fleet.keys).resolve()))
    config = msgspec.structs.replace(config, model=models, fleet=fleet)
    problem = next(_problems(config), None)
    if problem:
        raise ConfigInvalid(f"{path}: {problem[0]}: {problem[1]}")
    return config


def _say(reason: str) -> str:
    """msgspec ends with "- at `$.slot[0].model`"; the key goes first."""
    text, _, where = reason.partition(" - at `$")
    key = where.rstrip("`").lstrip(".") or "top level"
    said = f"{key}: {text[0].lower()}{text[1:]}"
    if "unknown field" in text:
        return f"{said}; known keys: {', '.join(_keys(key))}"
    if "nvalid enum value" in text:
        return f"{said}; one of {', '.join(repr(one) for one in _choices(key))}"
    return f"{said}; each of them is a table of its own, [[{key}]]" if key in _LISTS and "`object`" in text else said


def _choices(key: str) -> tuple[Any, ...]:
    """The words that the field at "section.field" or "section[0].field" may have."""
    section, _, field = key.partition(".")
    hint: Any = get_type_hints(SECTIONS[section.split("[")[0]]).get(field.split("[")[0])
    while hint is not None and get_origin(hint) is not Literal:
        hint = next(iter(get_args(hint)), None)
    return get_args(hint)


def _keys(key: str) -> tuple[str, ...]:
    section = key.split("[")[0].split(".")[0]
    return next(
        (kind.__struct_fields__ for name, kind in SECTIONS.items() if name == section), Config.__struct_fields__
    )


def _absolute(path: Path, model: Model) -> Model:
    return msgspec.structs.replace(model, path=str((path.parent / model.path).resolve()))


def _tensor_parallel(config: Config, slot: Slot, where: str) -> Any:
    """What a slot of several ranks cannot have yet, refused by name."""
    if slot.model in {model.name for model in config.model} and slot.tensor_parallel != config.ranks_of(slot.model):
        yield f"{where}.tensor_parallel", f"must be the same for all slots of {slot.model!r}: their weights are shared"
    if slot.tensor_parallel == 1:
        return
    if slot.device != "cpu":
        yield f"{where}.tensor_parallel", "is built for the CPU only: on a GPU it must be 1"
    if slot.kv_reuse:
        yield f"{where}.kv_reuse", "is built for tensor_parallel = 1 only"
    model = next((row for row in config.model if row.name == slot.model), None)
    why = undivided(Path(model.path), slot.tensor_parallel) if model else ""
    if why:
        yield f"{where}.tensor_parallel", why


def _problems(config: Config) -> Any:
    """Each cross-field rule that does not hold, as (key, reason)."""
    yield from config_sense.problems(config)
    yield from _fleet_problems(config)
    if not config.router.thinks() and (config.router.reasoning_start or config.router.reasoning_end):
        yield "router.reasoning_end", "needs router.reasoning_start too, or router.reasoning_parser"
    for kind, rows in (("model", config.model), ("slot", config.slot), ("peer", config.peer)):
        names = [row.name for row in rows]
        for index, name in enumerate(names):
            if not is_name(name):
                yield f"{kind}[{index}].name", f"{name!r} is no name (1-48 of a-z 0-9 _ . -)"
            if name in names[:index]:
                yield f"{kind}[{index}].name", f"{name!r} is used twice"
    ports = [config.router.port]
    for index, slot in enumerate(config.slot):
        if slot.url_port in ports:
            yield f"slot[{index}].url_port", f"{slot.url_port} is used twice"
        ports += [slot.url_port] if slot.url_port else []
    known = {model.name for model in config.model}
    for index, model in enumerate(config.model):
        folder = Path(model.path)
        if not (folder / "config.json").is_file():
            yield (
                f"model[{index}].path",
                f"{folder} holds no config.json (run `make setup` for the demo model)",
            )
    for index, slot in enumerate(config.slot):
        where = f"slot[{index}]"
        if slot.model not in known:
            yield f"{where}.model", f"no [[model]] is named {slot.model!r}"
        if not _DEVICE.fullmatch(slot.device):
            yield f"{where}.device", f'{slot.device!r} is neither "cpu" nor "gpu", "gpu:INDEX" or "gpu:GPU-UUID"'
        elif (slot.device == "cpu") != (config.gpuowner.memory == "memfd"):
            wanted = "memfd" if slot.device == "cpu" else "cuda_vmm"
            yield f"{where}.device", f'{slot.device!r} needs memory = "{wanted}" in [gpuowner]'
        if slot.device != "cpu" and slot.kv_bytes % _GRANULE:
            yield f"{where}.kv_bytes", f"must be a multiple of {_GRANULE} on a GPU: its memory comes in such pieces"
        if slot.device != "cpu" and slot.packed_weights:
            yield f"{where}.packed_weights", "is for the CPU: a GPU's kernels read matrices as they lie"
        if slot.device != "cpu" and slot.kv_reuse:
            yield f"{where}.kv_reuse", "is built for the CPU only: on a GPU an arena is zeroed when it is leased"
        if slot.device == "cpu" and slot.block_size % 32:
            yield f"{where}.block_size", "must be a multiple of 32: the CPU engine's attention has no other blocks"
        if slot.hang_limit_s < 10 * config.policy.poll_s:
            yield (
                f"{where}.hang_limit_s",
                "must be at least 10 times policy.poll_s, or a late poll looks like a hang",
            )
        if slot.spare and not any(row.model == slot.model and not row.spare for row in config.slot):
            yield f"{where}.spare", f"no slot of {slot.model!r} is left that it could replace"
        yield from _tensor_parallel(config, slot, where)
        if slot.start_deadline_s <= slot.hang_limit_s:
            yield f"{where}.start_deadline_s", "must be longer than hang_limit_s"
    keeper = config.envkeeper
    if not keeper.docker.startswith("unix:///"):
        yield "envkeeper.docker", f'{keeper.docker!r} is not "unix:///PATH": sandboxes and checkpoints lie on this host'
    if keeper.disk_low_mb > keeper.disk_budget_mb:
        yield "envkeeper.disk_low_mb", "must not be above envkeeper.disk_budget_mb"
    if config.router.request_deadline_s <= config.policy.fence_deadline_s + config.policy.step_deadline_s:
        yield (
            "router.request_deadline_s",
            "must be longer than policy.fence_deadline_s + policy.step_deadline_s, "
            "or requests expire inside a handover",
        )


def _fleet_problems(config: Config) -> Any:
    fleet = config.fleet
    if fleet.listen and not _is_address(fleet.listen):
        yield "fleet.listen", f"{fleet.listen!r} is not ADDRESS:PORT"
    elif fleet.listen and config_sense.meet(fleet.listen, f"{config.router.host}:{config.router.port}"):
        yield "fleet.listen", f"{fleet.listen!r} is the port of the router's clients (router.port)"
    if fleet.listen and not is_name(config.host.name):
        yield "host.name", f"{config.host.name!r} is no name (1-48 of a-z 0-9 _ . -)"
    for index, peer in enumerate(config.peer):
        if not fleet.listen:
            yield f"peer[{index}]", "needs fleet.listen"
        if peer.name == config.host.name:
            yield f"peer[{index}].name", f"{peer.name!r} is this host itself"
        if not _is_address(peer.address):
            yield f"peer[{index}].address", f"{peer.address!r} is not ADDRESS:PORT"
        if peer.address == fleet.listen:
            yield f"peer[{index}].address", f"{peer.address!r} is where this host itself listens (fleet.listen)"
        if peer.address in [other.address for other in config.peer[:index]]:
            yield f"peer[{index}].address", f"{peer.address!r} is used twice"
    if fleet.slow_s < fleet.beat_s:
        yield "fleet.slow_s", "must not be below fleet.beat_s, or every peer is slow between two questions"
    if fleet.lost_s <= fleet.slow_s:
        yield "fleet.lost_s", "must be longer than fleet.slow_s"
    if fleet.orphan_s < fleet.lost_s:
        yield "fleet.orphan_s", "must not be below fleet.lost_s, or requests end here that their host still waits for"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    named = re.fullmatch(r"[A-Za-z0-9._*-]+|\[[0-9A-Fa-f:.%a-z]+\]", host)
    return named is not None and re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 65536
