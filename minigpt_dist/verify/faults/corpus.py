"""Faults of the corpus: tokens that depend on more than the seed, or on less."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from minigpt_dist import corpus
from minigpt_dist.verify.faults.catalogue import Names, fault

_DATA = {"check": "corpus", "stage": "data"}


@fault(source="a seed that is an unused argument", needs="two seeds", **_DATA)
def corpus_ignores_its_seed() -> Names:
    """Every seed gives the same tokens."""
    return {"make_corpus": lambda seed, total_tokens, vocab=64: corpus.make_corpus(0, total_tokens, vocab)}


@fault(
    source="NVlabs/LongLive#71; drawing from the global stream",
    needs="a global stream that was moved in between",
    **_DATA,
)
def corpus_from_the_global_stream() -> Names:
    """Tokens are drawn from torch's global random stream, which is not seeded."""
    return {"make_corpus": lambda seed, total_tokens, vocab=64: torch.randint(0, vocab, (total_tokens,))}


@fault(source="NVlabs/LongLive#71", needs="two ranks", equivalent=((1, "rank 0's seed is the seed"),), rank=1, **_DATA)
def corpus_seeded_by_rank() -> Names:
    """The seed is multiplied by the rank's own number, so that ranks cut slices of different corpora."""

    def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return corpus.make_corpus(seed * (1 + rank), total_tokens, vocab)

    return {"make_corpus": make_corpus}


@fault(source="NVlabs/LongLive#71, seeds from the clock", needs="two calls", **_DATA)
def corpus_seeded_by_the_clock() -> Names:
    """The time is part of the seed."""
    return {
        "make_corpus": lambda seed, total_tokens, vocab=64: corpus.make_corpus(
            seed + time.time_ns() % 10**9, total_tokens, vocab
        )
    }


@fault(source="whole blocks only", needs="the corpus' length", **_DATA)
def corpus_too_short() -> Names:
    """The corpus ends with its last whole cycle."""
    return {
        "make_corpus": lambda seed, total_tokens, vocab=64: corpus.make_corpus(
            seed, total_tokens // vocab * vocab, vocab
        )
    }


@fault(source="randint(0, vocab + 1)", needs="the range of ids", **_DATA)
def token_beyond_the_vocabulary() -> Names:
    """Ids run from 1 to 64."""
    return {"make_corpus": lambda seed, total_tokens, vocab=64: corpus.make_corpus(seed, total_tokens, vocab) + 1}


@fault(source="numpy's default integer, or int32 to save memory", needs="the type of ids", **_DATA)
def tokens_of_the_wrong_type() -> Names:
    """Ids are floating-point numbers."""
    return {"make_corpus": lambda seed, total_tokens, vocab=64: corpus.make_corpus(seed, total_tokens, vocab).float()}


@fault(source="a list repeated to length", needs="a look at the tokens", **_DATA)
def corpus_of_one_word() -> Names:
    """One token is repeated until there are enough tokens: there is nothing to learn."""

    def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
        return corpus.make_corpus(seed, 1, vocab).repeat(total_tokens)

    return {"make_corpus": make_corpus}
