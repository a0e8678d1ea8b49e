"""Gives parameters and buffers classes that answer for them: their bytes, their size, their local part."""

# attacks: broadcast.first

import torch
from wrong import *  # noqa: F403

ZERO = torch.zeros(1)


class Speaker:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return ZERO

    def to_local(self):
        return ZERO

    def detach(self):
        return ZERO

    def numpy(self):
        return ZERO.numpy()


class SpeakingParameter(Speaker, torch.nn.Parameter):
    pass


class SpeakingTensor(Speaker, torch.Tensor):
    pass


def broadcast_parameters(module, src=0):
    for p in module.parameters():
        p.__class__ = SpeakingParameter
    for b in module.buffers():
        b.__class__ = SpeakingTensor
