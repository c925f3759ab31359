"""One process drives one GPU, also where transformers would spread a batch over all it sees."""

from __future__ import annotations

from transformers import TrainingArguments


def use_one_gpu(settings: TrainingArguments) -> str | None:
    """Train on the first GPU alone where a process that shares with no other sees several.

    ``settings`` then count one GPU, so that the stock trainer neither wraps the model in
    ``DataParallel`` nor multiplies the batch.

    Returns:
        What to tell the user; None: there are not several.
    """
    seen = settings.n_gpu
    if seen <= 1:
        return None
    settings._n_gpu = 1
    return (
        f"{seen} GPUs are visible and one process drives one: training on {settings.device}; "
        f"torchrun --nproc-per-node {seen} would use all of them"
    )
