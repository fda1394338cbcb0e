"""`auto` measures every choice of Transformer Engine's layers, `ln_out` among them."""

import contextlib

import pytest

from benchmarks.gpu.models import built
from megatron_autorecompute import attach
from megatron_autorecompute.compare import workload
from tests.transformer_engine.test_equality import on_cpu

STEPS = 16
AMPLE_GIB = 1.0


@pytest.mark.usefixtures("one_rank")
def test_norms_are_measured_to_hold_less_and_change_no_loss(monkeypatch):
    case = on_cpu("TE dense with RMSNorm")
    job = built(case)
    plain = [job.step() for _ in range(STEPS)]
    job = built(case)
    with contextlib.closing(attach(job.chunks, job.optimizer, budget_gib=AMPLE_GIB)) as auto:
        schedule = auto.schedule(workload.get_forward_backward_func())
        monkeypatch.setattr(workload, "get_forward_backward_func", lambda: schedule)
        losses, policies = [], []
        for _ in range(STEPS):
            losses.append(job.step())
            policies.append(auto.policy.format())
        (kind,) = auto.plan.profile.kinds
    assert losses == plain
    assert any("ln_out" in policy for policy in policies)
    assert policies[-1] == "none*4"
    held = {record.choice: record.held_bytes for record in kind.choices}
    norm = held["full"]  # a layer's input, as wide as the output of a norm
    for without, norms in (("none", 2), ("core_attn", 2), ("mlp", 1), ("mlp_act", 2)):
        modules = sorted({without, "ln_out"} - {"none"})
        alone = without if without == "none" else f"selective[{without}]"
        freed = held[alone] - held[f"selective[{'+'.join(modules)}]"]
        assert freed == pytest.approx(norms * norm, abs=40), without
