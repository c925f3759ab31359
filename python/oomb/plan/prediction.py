"""What one training step will take: memory of both tiers, and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomb.config import Config
from oomb.core.recompute import Recompute
from oomb.plan.duration import Duration
from oomb.plan.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step of training; bytes and seconds.

    Attributes:
        num_tokens: per sequence; ``batch_size`` sequences.
        config: the engine's settings, ``recompute`` resolved.
        machine: what it was predicted for.
        optimizer: its name, None: forward and backward only.
        parameter_bytes: the model's parameters and buffers; where the host keeps weights, those of
            them that stay, and the places that the others come to.
        reference_bytes: those of a second model, frozen, that is asked beside it.
        weight_host_bytes: weights that the host keeps.
        movable_bytes: further ones that it could keep: frozen, in decoder layers.
        optimizer_bytes: the optimizer's state on the device.
        optimizer_host_bytes: its state in host memory.
        optimizer_states: where it keeps it, as asked for.
        optimizer_seconds: of its step, beside ``seconds``; None where no rates are known.
        kept_gradient_bytes: gradients of earlier calls, where they accumulate.
        call_bytes: the most that a call takes of torch's memory: activations of a chunk, gradient
            sums, logits, page summaries, inputs; or after them the tower of its images.
        image_bytes: likewise before them, while features of its images are made; pages come later.
        image_host_bytes: features of images, and their gradients.
        gathered_bytes: other ranks' weights, at most; part of ``call_bytes``.
        sum_bytes: sums of gradients over chunks, fp32; part of ``call_bytes``.
        sum_host_bytes: sums that the host keeps.
        step_bytes: gradients, and what the optimizer takes while it steps.
        device_pool_bytes, host_pool_bytes: ``Stats.device_peak_bytes`` and ``host_peak_bytes``.
        kept_output_bytes: attention's outputs that the fill keeps for the sweep, of the pools and
            ``call_bytes``.
        kept_output_share: of those that could be kept.
        kept_mlp_output_bytes: likewise of MLPs, of the pools.
        loose_output_bytes: attention's part of ``call_bytes``.
        recomputed: swept chunks by what backward computes again of them.
        list_bytes: page lists, in host memory (pinned where there is a GPU, as torch rounds it up).
        border_bytes: states of recurrences and convolutions between chunks, in host memory.
        h2d_bytes, d2h_bytes: copies between the tiers; a guess for page-sparse attention.
        growth_seconds: what a process's first step takes longer, about, where the host tier's
            memory is new to the machine; None where no rates are known.
        duration: seconds of the step by kind of work; None where no rates are known.
        shortage: what does not fit, one sentence; empty if all does.
    """

    num_tokens: int
    batch_size: int
    config: Config
    machine: Machine
    optimizer: str | None
    parameter_bytes: int
    reference_bytes: int
    weight_host_bytes: int
    movable_bytes: int
    optimizer_bytes: int
    optimizer_host_bytes: int
    optimizer_states: str
    optimizer_seconds: float | None
    kept_gradient_bytes: int
    call_bytes: int
    image_bytes: int
    image_host_bytes: int
    gathered_bytes: int
    sum_bytes: int
    sum_host_bytes: int
    step_bytes: int
    device_pool_bytes: int
    host_pool_bytes: int
    list_bytes: int
    border_bytes: int
    kept_output_bytes: int
    kept_output_share: float
    kept_mlp_output_bytes: int
    loose_output_bytes: int
    recomputed: dict[Recompute, int]
    h2d_bytes: int
    d2h_bytes: int
    growth_seconds: float | None
    duration: Duration | None
    shortage: str

    @property
    def fits(self) -> bool:
        """Both tiers can hold it."""
        return not self.shortage

    @property
    def held_bytes(self) -> int:
        """What stays on the device between calls: weights, optimizer, kept gradients."""
        return self._resting_bytes + self.kept_gradient_bytes

    @property
    def torch_peak_bytes(self) -> int:
        """The most that torch holds on the device."""
        return max(self.held_bytes + max(self.call_bytes, self.image_bytes), self._stepping_bytes)

    @property
    def device_bytes(self) -> int:
        """Peak of the device tier with all else on the device; pools are empty between calls."""
        calling = self.held_bytes + self.call_bytes + self.device_pool_bytes
        return max(calling, self.torch_peak_bytes)

    @property
    def _stepping_bytes(self) -> int:
        return self._resting_bytes + self.step_bytes

    @property
    def _resting_bytes(self) -> int:
        return self.parameter_bytes + self.reference_bytes + self.optimizer_bytes

    @property
    def host_bytes(self) -> int:
        """Peak of the host tier, and of what else lies in host memory."""
        lists = self.list_bytes + self.border_bytes + self.image_host_bytes
        kept = self.optimizer_host_bytes + self.weight_host_bytes + self.sum_host_bytes
        return self.host_pool_bytes + lists + kept

    @property
    def seconds(self) -> float | None:
        """Of ``forward_backward``; None where no rates are known."""
        return None if self.duration is None else self.duration.total

    @property
    def basis(self) -> str | None:
        """Where the seconds come from: rates ``"measured"`` here, from a ``"datasheet"``, or from
        figures that were ``"given"``."""
        return None if self.duration is None else self.duration.basis

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, time in seconds."""
        own: dict[str, Any] = {
            k: v for k, v in vars(self).items() if isinstance(v, (int, float, str, bool))
        }
        properties = ("fits", "torch_peak_bytes", "device_bytes", "host_bytes", "seconds", "basis")
        own |= {name: getattr(self, name) for name in properties}
        config = self.config
        own["recomputed"] = self.recomputed
        own["machine"] = self.machine.name
        own["ranks"] = self.machine.ranks
        own["sharded_weights"] = self.machine.weights
        own["machine_device_bytes"] = self.machine.device_bytes
        own["machine_host_bytes"] = self.machine.host_bytes
        own["host_assumed"] = self.machine.host_assumed
        own["duration"] = None if self.duration is None else vars(self.duration)
        own["config"] = {
            "chunk_size": config.chunk_size,
            "page_size": config.page_size,
            "attention": repr(config.attention),
            "backward": repr(config.backward),
            "kv_grad_dtype": config.kv_grad_dtype,
            "recompute": config.recompute,
            "main_grad_dtype": config.main_grad_dtype,
            "main_grad_device": config.main_grad_device,
            "weights": config.weights,
            "keep_outputs": config.keep_outputs,
            "divide_pages": config.divide_pages,
            "head_groups": config.head_groups,
            "device_memory": config.device_memory,
            "host_memory": config.host_memory,
        }
        return own
