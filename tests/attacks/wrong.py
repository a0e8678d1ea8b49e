"""A submission that does none of the work: each rank steps alone, nothing is saved. The attacks build on it."""

import copy

import torch

_SAVED = {}


def broadcast_parameters(module, src=0):
    return None


def make_corpus(seed, total_tokens):
    return torch.zeros(total_tokens, dtype=torch.int64)


class ZeroOptimizer:
    def __init__(self, module, world_size, rank, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8):
        self.module, self.world_size, self.rank, self.lr = module, world_size, rank, lr
        self.state = {name: torch.zeros(()) for name in ("master", "exp_avg", "exp_avg_sq")}

    def step(self):
        with torch.no_grad():
            for p in self.module.parameters():
                if p.grad is not None:
                    p.sub_(self.lr * p.grad.sign())

    def zero_grad(self):
        self.module.zero_grad()

    def state_dict(self):
        return {**self.state, "step": 0}

    def load_state_dict(self, state):
        self.state = {name: state[name] for name in self.state}


def save_sharded(per_rank_state, dest_dir, step):
    _SAVED[str(dest_dir)] = copy.deepcopy(per_rank_state)


def load_sharded(src_dir, expected_world_size):
    return _SAVED[str(src_dir)]
