"""The Triton kernel of :mod:`oomb.model.cross_entropy`; CPU builds of torch come without Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    targets,
    terms,
    scale,
    stride,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
):
    """One program per row: its term, and the gradient in place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    target = tl.load(targets + row)
    at_target = tl.load(line + target).to(tl.float32)
    highest = -float("inf")
    total = 0.0
    for begin in range(0, vocabulary, block):
        at = begin + tl.arange(0, block)
        x = tl.load(line + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        highest = higher
    tl.store(terms + row, (highest - at_target) + tl.log(total))
    share = 1.0 / total  # no logarithm in the gradient: its rounding would be felt in fp32
    tl.debug_barrier()  # everybody has read what is overwritten now
    for begin in range(0, vocabulary, block):
        at = begin + tl.arange(0, block)
        x = tl.load(line + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        gradient = scale * (tl.exp(x - highest) * share - tl.where(at == target, 1.0, 0.0))
        tl.store(line + at, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)
