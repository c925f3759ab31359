"""Which checkpoint a run goes on from."""

from __future__ import annotations

from collections.abc import Mapping

import transformers

from oomb.checkpoint import Checkpoint, CheckpointError, CheckpointStore

_log = transformers.logging.get_logger("oomb.hf")


def is_own(checkpoint: Checkpoint, store: CheckpointStore) -> bool:
    """Whether a checkpoint stands in a store's folder."""
    return checkpoint.path.resolve() == store.path_of(checkpoint.step).resolve()


def checkpoint_to_resume(
    asked: str | bool | None, store: CheckpointStore, identity: Mapping[str, str], *, saves: bool
) -> Checkpoint | None:
    """The checkpoint that ``resume_from_checkpoint`` means; None: a fresh run.

    Args:
        asked: True: the newest intact one of the store; or a checkpoint's folder.
        store: where this run would save.
        identity: of the model.
        saves: whether this run saves, so that older checkpoints would mix with its own.

    Raises:
        ValueError: the store holds checkpoints of another run.
        CheckpointError: none can be resumed from; the message says why.
    """
    if not asked:
        if saves and store.steps():
            last = store.path_of(store.steps()[-1]).name
            raise ValueError(
                "output_dir: expected one without checkpoints, or resume_from_checkpoint=True, "
                f"got {store.folder} with {last}"
            )
        return None
    return _newest(store, identity) if asked is True else _named(str(asked), store, identity)


def _newest(store: CheckpointStore, identity: Mapping[str, str]) -> Checkpoint:
    checkpoint = store.newest_intact(identity)
    reasons = [f"{path.name} {reason}" for path, reason in store.rejected]
    if checkpoint is None:
        found = "; ".join(reasons) or "none"
        raise CheckpointError(
            f"resume_from_checkpoint: expected an intact checkpoint in {store.folder}, got {found}"
        )
    for reason in reasons:
        _log.warning(f"checkpoint passed over: {reason}")
    return checkpoint


def _named(asked: str, store: CheckpointStore, identity: Mapping[str, str]) -> Checkpoint:
    try:
        checkpoint = store.verified(asked, identity)
    except CheckpointError as error:
        raise CheckpointError(f"resume_from_checkpoint: {asked}: {error}") from error
    last = max(store.steps(), default=0)
    if is_own(checkpoint, store) and last > checkpoint.step:
        raise ValueError(
            f"resume_from_checkpoint: expected the last one of {store.folder}, "
            f"{store.path_of(last).name}, got {checkpoint.path.name}: later saves would mix two "
            "runs; use another output_dir, or move the later ones away"
        )
    return checkpoint
