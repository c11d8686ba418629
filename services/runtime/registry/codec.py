"""WorkerInfo as JSON in Redis, and the names of the keys. Unknown members are ignored, so that versions may differ in a fleet."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from kvrelay.handle import KvLayout, ModelIdentity
from services.runtime.ports import Topology, WorkerInfo, WorkerLoad

V = TypeVar("V")
HASH_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one namespace; the braces put them all on one shard of a cluster."""

    namespace: str

    @property
    def index(self) -> str:
        """Hash: worker id to the incarnation registered last, kept until that life's blocks are cleared."""
        return self._key("workers")

    @property
    def events(self) -> str:
        """Stream of changes."""
        return self._key("events")

    @property
    def sequence(self) -> str:
        """Hash: `epoch` of the numbering and `n`, the number of the last event."""
        return self._key("sequence")

    def worker(self, worker_id: str) -> str:
        """Hash: `incarnation` and `info` of a live worker."""
        return self._key("worker", worker_id)

    def fence(self, worker_id: str) -> str:
        """String: the greatest incarnation seen; outlives the worker's entry."""
        return self._key("fence", worker_id)

    def block(self, block_hash: bytes) -> str:
        """Hash: worker id to the incarnation that holds the block."""
        return self.block_prefix + block_hash.hex()

    @property
    def block_prefix(self) -> str:
        return self._key("block", "")

    def held(self, worker_id: str, incarnation: int) -> str:
        """Set: raw hashes of the blocks that this life published."""
        return self._key("held", worker_id, padded(incarnation))

    def _key(self, *parts: str) -> str:
        return ":".join((f"{{{self.namespace}}}", *parts))


def padded(incarnation: int) -> str:
    """20 digits: as text these order as the numbers do, which Lua's floating-point numbers, exact to 2**53 only, would not."""
    return f"{incarnation:020d}"


def worker_to_json(worker: WorkerInfo) -> str:
    """Compact JSON of a worker."""
    return json.dumps(dataclasses.asdict(worker), separators=(",", ":"))


def worker_from_json(text: bytes | str) -> WorkerInfo:
    """The worker; ValueError for anything that is not one."""
    try:
        members = json.loads(text)
        return WorkerInfo(
            **{
                **_known(WorkerInfo, members),
                "identity": _value(ModelIdentity, members.get("identity")),
                "layout": _value(KvLayout, members.get("layout")),
                "topology": _value(Topology, members.get("topology")) or Topology(),
                "load": _value(WorkerLoad, members.get("load")) or WorkerLoad(),
            }
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a worker: {error}") from error


def split_hashes(joined: bytes) -> tuple[bytes, ...]:
    """Block hashes that travelled as one string."""
    return tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))


def _known(cls: Any, members: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in members.items() if name in names}


def _value(cls: type[V], members: dict[str, Any] | None) -> V | None:
    return None if members is None else cls(**_known(cls, members))
