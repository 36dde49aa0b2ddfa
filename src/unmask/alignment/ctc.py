"""The alignment without transitions (ExLM's ablation): each position's k states against its own label, by CTC.

A sequence of k symbols stands for one label y if it is blanks, then one or more y, then blanks. With P_s the states'
distributions, the probability of y is the sum over all such sequences: a recursion over "before", "in" and "after" y.
"""

import torch
from torch import Tensor


def single_label(label: Tensor, blank: Tensor) -> Tensor:
    """log-probability [...] of one label, from log P_s(label) and log P_s(blank), both [..., k] (broadcast), k >= 1."""
    label, blank = torch.broadcast_tensors(label, blank)
    before, inside, after = blank[..., 0], label[..., 0], None
    for s in range(1, label.shape[-1]):
        leaving = inside if after is None else torch.logaddexp(inside, after)
        after = leaving + blank[..., s]
        inside = torch.logaddexp(inside, before) + label[..., s]
        before = before + blank[..., s]
    return inside if after is None else torch.logaddexp(inside, after)
