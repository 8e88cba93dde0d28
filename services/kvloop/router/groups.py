"""Models as groups of workers serve them: within a group KV can go from each to each."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvloop.router.worker import AnyWorker
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import worker_pb2

NO_WORKER_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """A model as one group of workers serves it."""

    name: str
    revision: str
    adapter: str
    compatibility: str
    max_model_len: int
    vocab_size: int
    kv_recompute_threshold: int
    default_max_tokens: int | None = None
    """Of an answer that asks for none; 0: what max_model_len leaves. None: not known, or not one number."""

    def fits(self, info: worker_pb2.WorkerInfo | None) -> bool:
        """Tell whether a worker belongs to the group and serves the adapter."""
        return (
            info is not None
            and info.model.name == self.name
            and info.model.revision == self.revision
            and info.compatibility == self.compatibility
            and (not self.adapter or self.adapter in info.adapters)
        )


def versions(workers: Iterable[AnyWorker], name: str, adapter: str) -> list[Served]:
    """Return a model in every group of workers that serves it, in an order that does not depend on theirs.

    name: "" for the only one. Failures: MODEL_NOT_FOUND, NO_WORKER while no facts are known, INVALID_FIELD.
    """
    infos = [worker.info for worker in workers if worker.info is not None]
    if not infos:
        raise Failure(
            Reason.ERROR_REASON_NO_WORKER, "no worker has answered yet", retry_after_s=NO_WORKER_RETRY_S
        )
    names = {info.model.name for info in infos}
    if not name and len(names) > 1:
        raise invalid("model", "several models are served; name one")
    chosen = name or next(iter(names))
    if chosen not in names:
        raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such model is served", field="model")
    able = [i for i in infos if i.model.name == chosen and (not adapter or adapter in i.adapters)]
    if not able:
        raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such adapter is served", field="adapter")
    groups: dict[tuple[str, str, str] | None, list[worker_pb2.WorkerInfo]] = {}
    for info in able:
        groups.setdefault(group_of(info), []).append(info)
    return [
        Served(
            name=chosen,
            revision=members[0].model.revision,
            adapter=adapter,
            compatibility=members[0].compatibility,
            max_model_len=min(info.max_model_len for info in members),
            vocab_size=min(info.vocab_size for info in members),
            kv_recompute_threshold=max(info.kv_recompute_threshold for info in members),
            default_max_tokens=_default_max_tokens(members),
        )
        for _, members in sorted(groups.items(), key=lambda group: group[0] or ())
    ]


def _default_max_tokens(members: list[worker_pb2.WorkerInfo]) -> int | None:
    told = {info.default_max_tokens if info.HasField("default_max_tokens") else None for info in members}
    return told.pop() if len(told) == 1 else None


def group_of(info: worker_pb2.WorkerInfo | None) -> tuple[str, str, str] | None:
    """Return what a worker's group has in common; None while that is unknown."""
    return None if info is None else (info.model.name, info.model.revision, info.compatibility)
