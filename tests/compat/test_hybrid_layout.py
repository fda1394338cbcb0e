"""Layouts of patterns against Megatron's own `select_pipeline_segment`."""

import itertools
import random

import pytest

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import FAMILIES, HybridPattern
from megatron_autorecompute.planner.cost.layout import Layout

allocation = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_allocation")


class Group:
    """A pipeline group, as far as select_pipeline_segment asks."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def megatrons(pattern, pp, vp, first, last):
    """Layers by [stage][chunk], or None if Megatron refuses."""
    main = allocation.parse_hybrid_pattern(pattern).main_pattern
    try:
        return tuple(
            tuple(
                _layers(main, Group(rank, pp), chunk if vp > 1 else None, first, last)
                for chunk in range(vp)
            )
            for rank in range(pp)
        )
    except ValueError:
        return None


def _layers(main, group, chunk, first, last):
    symbols, offset = allocation.select_pipeline_segment(main, group, chunk, first, last)
    layers = tuple(range(offset, offset + len(symbols)))
    assert "".join(symbols) == "".join(main.replace("|", "")[i] for i in layers)
    return layers


def ours(pattern, pp, vp, first, last):
    """The same by Layout, MTP depths left out."""
    try:
        read = HybridPattern.parse(pattern)
        layout = Layout.from_pattern(
            read,
            pp,
            vp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
    except PipelineError:
        return None
    depths = range(read.num_layers, read.num_layers + read.mtp_num_layers)
    assert layout.stages[-1][-1].layers[-len(depths) or 99 :] == tuple(depths)
    return tuple(
        tuple(tuple(i for i in chunk.layers if i < read.num_layers) for chunk in chunks)
        for chunks in layout.stages
    )


def test_segments_are_those_of_megatron(monkeypatch):
    for name, get in (("get_rank", "rank"), ("get_world_size", "size")):
        monkeypatch.setattr(allocation.torch.distributed, name, lambda g, a=get: getattr(g, a))
    monkeypatch.setattr(allocation, "log_on_each_pipeline_stage", lambda *a, **k: None)
    monkeypatch.setattr(allocation, "log_single_rank", lambda *a, **k: None)
    chosen, agreed = random.Random(0), 0
    assert set(FAMILIES) == allocation.Symbols.VALID_LAYERS
    for _, pp, vp in itertools.product(range(90), (1, 2, 3), (1, 2)):
        pattern = "".join(chosen.choices("*-EMG||", k=chosen.randint(2, 9)))
        pattern += chosen.choice(["", "/*E", "/*-/*-"])
        ends = chosen.choice([(None, None)] * 3 + [(1, None), (None, 2), (1, 1)])
        theirs, here = megatrons(pattern, pp, vp, *ends), ours(pattern, pp, vp, *ends)
        if here is not None:
            assert here == theirs, (pattern, pp, vp, ends)
            agreed += 1
        elif theirs is not None:  # Megatron would leave layers out
            built = sorted(i for chunks in theirs for chunk in chunks for i in chunk)
            count = allocation.get_hybrid_total_layer_count(pattern)
            others = pattern.count("|") not in (0, pp * vp - 1) or pp < vp  # by chance
            assert built != [*range(count)] or not count or others, (pattern, pp, vp, ends)
    assert agreed > 50
