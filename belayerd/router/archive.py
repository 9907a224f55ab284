"""What has ended and may still be asked for by its name: bounded by bytes, the least recently ended goes first."""

from __future__ import annotations

from collections import OrderedDict

from belayerd.router.records import Past


class Archive:
    """Pure: a mapping from name to story. Only requests whose client gave them an id have a name."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stories: OrderedDict[str, tuple[Past, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stories)

    def put(self, past: Past) -> None:
        """Keep it in the place of an earlier one of the same name; a story above the whole bound is not kept."""
        self.take(past.name)
        size = past.bytes()
        self._stories[past.name] = past, size
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, (_, freed) = self._stories.popitem(last=False)
            self.bytes -= freed

    def get(self, name: str) -> Past | None:
        found = self._stories.get(name)
        return found[0] if found else None

    def take(self, name: str) -> Past | None:
        found = self._stories.pop(name, None)
        if found is None:
            return None
        self.bytes -= found[1]
        return found[0]
