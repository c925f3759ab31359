"""What a call will take, before it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from oomb.config import Config
from oomb.core.committed import committed_bytes
from oomb.core.fit import Room
from oomb.core.growth import growth_seconds
from oomb.core.inputs import expect
from oomb.core.page_demand import PageDemand
from oomb.core.pools import Needs, Pools
from oomb.core.recompute import Recompute
from oomb.errors import OutOfMemoryError
from oomb.model.causal import CausalModel
from oomb.trace.layerwise import layerwise_bytes
from oomb.trace.tower import TowerUse
from oomb.units import bytes_text

_LONGEST, _MOST_SEQUENCES = 2**40, 2**20  # of a call that is planned


def check_planned(num_tokens: int, batch_size: int, image_tokens: int = 0) -> None:
    """Refuse numbers that no call has, before anything is counted.

    Raises:
        ValueError: one is no int, or out of bounds.
    """
    for name, value, least, most, bounds in (
        ("num_tokens", num_tokens, 1, _LONGEST, f"1 ... {_LONGEST:,}"),
        ("batch_size", batch_size, 1, _MOST_SEQUENCES, f"1 ... {_MOST_SEQUENCES:,}"),
        ("image_tokens", image_tokens, 0, num_tokens, "0 ... num_tokens"),
    ):
        is_int = isinstance(value, int) and not isinstance(value, bool)
        # As text a number may have more digits than Python prints.
        got = "more" if is_int and value >= 2**63 else repr(value)
        expect(is_int and least <= value <= most, name, f"an int in {bounds}", got)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory of one call.

    Attributes:
        device_bytes: device tier, a chunk's activations, outputs that are kept beside them, and the
            gradient sums; or what the tower of images takes before, or after the chunks in their
            place.
        host_bytes: host tier, page lists, states at the borders between chunks, features of images.
            Of the tier the most that the call takes; where that does not fit, the least it needs.
        seconds: predicted time; None until a call of this shape was measured.
        growth_seconds: about how much longer the call takes, at most, to pin memory of the host
            tier that earlier calls have not pinned.
        fits: the call would begin now.
        advice: what to change, most useful first, and whether ordinary training would need less;
            empty where there is nothing to say.
        kept_output_share: of attention's outputs that the fill could keep for the sweep.
        kept_output_bytes: their part of that memory.
        kept_output_seconds: of attention that they spared the last call of this shape; None before.
        kept_mlp_output_bytes: of that memory, for outputs of MLPs.
    """

    device_bytes: int
    host_bytes: int
    seconds: float | None
    fits: bool
    advice: tuple[str, ...]
    kept_output_share: float = 0.0
    kept_output_bytes: int = 0
    kept_output_seconds: float | None = None
    kept_mlp_output_bytes: int = 0
    growth_seconds: float = 0.0

    def with_tower(self, tower: TowerUse, free: int) -> Plan:
        """With features of images on the host, and where more than that, their tower's own work.

        Args:
            free: bytes of the device, which has no pages yet when the tower runs.
        """
        advice = self.advice
        if tower.before_bytes > free:
            advice = (
                f"images: {bytes_text(tower.before_bytes)} on the device before the first chunk, "
                f"and {bytes_text(free)} are free: show fewer in a call",
                *advice,
            )
        return replace(
            self,
            device_bytes=max(self.device_bytes, tower.before_bytes),
            host_bytes=self.host_bytes + tower.host_bytes(),
            fits=self.fits and tower.before_bytes <= free,
            advice=advice,
        )


def plan_call(
    model: CausalModel,
    config: Config,
    pools: Pools,
    demand: PageDemand,
    needs: Needs,
    recompute: Recompute,
) -> Plan:
    """Plan of ``forward_backward`` on a batch with labels on every token."""
    slot = demand.layout.slot_bytes
    room, advice = pools.room(demand, config, needs), list[str]()
    slots, kept, caps = demand.page_slots, None, None
    try:
        found = pools.fit(demand, config, needs)
        kept, caps = found.outputs, found.caps
        slots += kept.slots
        on_device = min(caps.device_slots, slots) * slot
    except OutOfMemoryError as error:
        on_device = min(room.device // slot, slots) * slot
        advice = _advice(error, config, demand, room, recompute)
    least = on_host = slots * slot - on_device
    if least > 0:
        least = on_host = least + demand.transit_slots * slot
    if caps is not None and on_host > 0:  # where there is room, pages stay when they are copied
        on_host = committed_bytes(
            min(slots, caps.host_capacity) * slot,
            slot_bytes=slot,
            max_slots=caps.host_capacity,
            device_type=demand.device_type,
            on_host=True,
        )
    of_attention, of_mlps, loose = 0, 0, 0
    if kept is not None:
        of_attention, of_mlps = kept.num_bytes, kept.mlp_slots * slot
        loose = kept.loose_bytes
    lists = demand.list_bytes + demand.border_bytes
    layerwise = layerwise_bytes(
        demand.batch * (demand.chunks.tokens + 1),
        layers=len(model.layers),
        hidden_size=model.decoder.config.hidden_size,
        shape=demand.shapes[0],
        element_bytes=torch.finfo(model.dtype).bits // 8,
    )
    theirs = layerwise.device_bytes + _gradient_bytes_as_they_are(model) + layerwise.host_bytes
    if theirs < on_device + loose + needs.others + least + lists - of_attention - of_mlps:
        advice.append(
            "ordinary training with checkpointing, tiled MLP and loss, and layer inputs offloaded "
            f"to the host needs less memory here: about {bytes_text(theirs)} on device and host, "
            f"{bytes_text(layerwise.host_bytes)} of them on the host"
        )
    return Plan(
        device_bytes=on_device + loose + needs.others,
        host_bytes=on_host + lists,
        seconds=None,
        fits=kept is not None,
        advice=tuple(advice),
        kept_output_share=0.0 if kept is None else kept.share,
        kept_output_bytes=of_attention,
        kept_mlp_output_bytes=of_mlps,
        growth_seconds=growth_seconds(pools.to_pin(on_host)),
    )


def _advice(
    error: OutOfMemoryError, config: Config, demand: PageDemand, room: Room, recompute: Recompute
) -> list[str]:
    """What to change where a call does not fit, most useful first."""
    slot = demand.layout.slot_bytes
    on_device = room.device // slot * slot
    if room.device < demand.smallest_slots * slot:
        settings = [] if recompute == "layer" else ["set recompute='layer'"]
        return [*settings, "lower chunk_size" if room.device_cap is None else "raise device_memory"]
    on_host = (demand.needed_slots + demand.transit_slots) * slot - on_device
    if on_host <= room.host(on_device):  # it is what shall be kept that does not fit
        return [str(error)]
    advice = []
    if demand.layout.grad_slots > 1:
        advice.append("set kv_grad_dtype='bfloat16': half the memory of the gradient pages")
    return [*advice, f"raise host_memory to {bytes_text(on_host)}"]


def _gradient_bytes_as_they_are(model: CausalModel) -> int:
    parameters = [p for p in model.causal.parameters() if p.requires_grad]
    return sum(p.numel() * p.element_size() for p in parameters)
