"""What the OCI runtime is told about a container, and what it says back: files named for the container's id.

    <id>            ours: restore this checkpoint when the container is created (once: the runtime renames it away)
    <id>.used       the runtime took it
    <id>.started    the runtime has answered `start`
    <id>.once       made by the runtime at the first start; a second one is refused as long as it is there
    <id>.owner      ours: which root the container is of; only that one's envkeeper sweeps

One place per host, whatever our root: the runtime has no configuration, and nothing that an image says reaches it.
"""

from __future__ import annotations

from pathlib import Path

from belayer.statefile import write_bytes

CLAIMS = Path("/run/belayer-runtime/claims")


def make_folder() -> None:
    CLAIMS.mkdir(mode=0o700, parents=True, exist_ok=True)
    CLAIMS.parent.chmod(0o700)


def born(container_id: str, owner: str) -> None:
    write_bytes(CLAIMS / f"{container_id}.owner", owner.encode(), durable=False)


def arm(container_id: str, claim: str) -> None:
    write_bytes(CLAIMS / container_id, claim.encode(), durable=False)


def taken(container_id: str) -> bool:
    return not (CLAIMS / container_id).exists()


def disarm(container_id: str) -> None:
    """The restore is over; that it was started once stays known."""
    for name in (container_id, f"{container_id}.used", f"{container_id}.started"):
        (CLAIMS / name).unlink(missing_ok=True)


def forget(container_id: str) -> None:
    """The container is gone."""
    disarm(container_id)
    for kind in ("once", "owner"):
        (CLAIMS / f"{container_id}.{kind}").unlink(missing_ok=True)


def sweep(owner: str, existing: set[str]) -> None:
    """Forget containers of ``owner`` that are no more (removed by other hands)."""
    for path in CLAIMS.glob("*.owner"):
        container_id = path.name.removesuffix(".owner")
        if container_id not in existing and path.read_bytes() == owner.encode():
            forget(container_id)
