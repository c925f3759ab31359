"""Changes that make a run fit, or nearly: what each saves, and what it costs in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from oomb.config import Config
from oomb.plan.prediction import Prediction

# Of settings of the engine, the optimizer, and where that keeps its states.
Predict = Callable[[Config, str | None, str], Prediction]

# How much a change alters the result: not at all, by roundings, by another rule of the optimizer.
_EXACT, _ROUNDED, _OTHER = range(3)
_ALTERS = {
    "recompute=pointwise": _EXACT,
    "recompute=layer": _EXACT,
    "chunk_size=512": _EXACT,
    "weights=host": _EXACT,
    "main_grad_device=host": _EXACT,
    "optimizer_states=host": _EXACT,
    "optimizer=paged_adamw_32bit": _EXACT,
    "optimizer=adafactor": _OTHER,
}
_OPTIMIZERS = ("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adafactor")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change of a setting, or several together.

    Attributes:
        changes: names and values of settings, in the order in which they were added.
        saved_bytes: of what the device holds beside pages; where pages shrink, of them in both
            tiers.
        host_bytes: what the host holds more beside pages.
        seconds: what a step takes longer; None where no rates are known.
        fits: with it the step fits.
    """

    changes: tuple[tuple[str, str], ...]
    saved_bytes: int
    host_bytes: int
    seconds: float | None
    fits: bool

    @property
    def alters(self) -> int:
        """How much it alters the result; 0: not at all."""
        return max(_ALTERS.get(f"{name}={value}", _ROUNDED) for name, value in self.changes)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes)


def remedies(asked: Prediction, predict: Predict) -> tuple[Remedy, ...]:
    """Single changes that save memory: those that make the step fit first; of these the ones that
    alter the result least, then the fastest.

    Each is tried by itself; where none is enough, the last is all of those together, with the
    smallest optimizer.

    Args:
        asked: what does not fit.
        predict: the same step with another config, optimizer and place of its states.
    """
    tried = (_tried(asked, predict, changes) for changes in _single(asked))
    saving = [remedy for remedy in tried if remedy is not None and remedy.saved_bytes > 0]
    found = list(saving)
    found.sort(key=lambda one: (not one.fits, one.alters, one.seconds or 0.0, -one.saved_bytes))
    if found and not any(one.fits for one in found):
        together: dict[str, str] = {}
        for remedy in saving:
            together |= dict(remedy.changes)  # of several optimizers the last, the smallest
        if together.get("optimizer", "").startswith("paged_"):
            together.pop("optimizer_states", None)
        new = tuple(together.items()) not in [remedy.changes for remedy in saving]
        whole = _tried(asked, predict, together) if new else None
        if whole is not None and whole.saved_bytes > 0:
            found.append(whole)
    return tuple(found)


def _single(asked: Prediction) -> Iterator[dict[str, str]]:
    """Changes that could save something, the harmless ones first."""
    config = asked.config
    if config.recompute == "none":
        yield {"recompute": "pointwise"}
    if config.recompute != "layer":
        yield {"recompute": "layer"}
    if config.chunk_size > 512 and 512 % config.page_size == 0:
        yield {"chunk_size": "512"}
    if config.main_grad_dtype == "float32" and asked.sum_bytes:
        yield {"main_grad_dtype": "bfloat16"}
    on_gpu = asked.machine.device_type == "cuda"
    may_move = asked.machine.weights != "zero1"  # there they are whole until a call ends
    if asked.sum_bytes and not asked.sum_host_bytes and on_gpu and may_move:
        yield {"main_grad_device": "host"}
    if config.kv_grad_dtype == "float32":
        yield {"kv_grad_dtype": "bfloat16"}
    if asked.movable_bytes > 0 and asked.machine.device_type == "cuda":
        yield {"weights": "host"}
    if asked.machine.weights != "replicated":
        return  # trainers refuse what follows beside shards
    if asked.optimizer_bytes > 0 and asked.machine.device_type == "cuda":
        yield {"optimizer_states": "host"}
    if asked.optimizer is not None and asked.machine.device_type == "cuda":
        for name in _OPTIMIZERS:
            if name != asked.optimizer:
                yield {"optimizer": name}


def _tried(asked: Prediction, predict: Predict, changes: dict[str, str]) -> Remedy | None:
    """None: it cannot be set, for this model or beside what is asked for."""
    of_engine = {k: v for k, v in changes.items() if not k.startswith("optimizer")}
    settings: dict[str, object] = dict(of_engine)
    if "chunk_size" in settings:
        settings["chunk_size"] = int(changes["chunk_size"])
    name = changes.get("optimizer", asked.optimizer)
    states = changes.get("optimizer_states", asked.optimizer_states)
    if "optimizer" in changes and changes["optimizer"].startswith("paged_"):
        states = "device"
    try:
        config = replace(asked.config, **settings)  # type: ignore[arg-type]
        other = predict(config, name, states)
    except ValueError:  # what was asked for was none, so it is of the change
        return None
    seconds = None
    if asked.seconds is not None and other.seconds is not None:
        seconds = other.seconds - asked.seconds
        seconds += (other.optimizer_seconds or 0.0) - (asked.optimizer_seconds or 0.0)
    saved = _beside_pages(asked) - _beside_pages(other)
    if "kv_grad_dtype" in changes:
        saved += asked.device_pool_bytes + asked.host_pool_bytes
        saved -= other.device_pool_bytes + other.host_pool_bytes
    return Remedy(
        changes=tuple(changes.items()),
        saved_bytes=saved,
        host_bytes=_on_host(other) - _on_host(asked),
        seconds=seconds,
        fits=other.fits,
    )


def _on_host(prediction: Prediction) -> int:
    kept = prediction.optimizer_host_bytes + prediction.weight_host_bytes
    return kept + prediction.sum_host_bytes


def _beside_pages(prediction: Prediction) -> int:
    return prediction.held_bytes + prediction.call_bytes
