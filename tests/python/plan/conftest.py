"""Tiny models gain nothing from torch's threads, which spin where cores are shared."""

import torch

torch.set_num_threads(1)
