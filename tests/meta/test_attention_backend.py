"""Which attention runs on which device, and what flash-attn's copies take."""

import pytest

from megatron_autorecompute.meta.attention import with_backend
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.profiling import profile_job
from tests.meta.test_no_device import H100, SEQUENCE, UNIT, job, records

A100, GB200 = device("a100-80gb"), device("gb200-186gb")
DETERMINISTIC = {"deterministic_mode": True}
DROPOUT = {"attention_dropout": 0.1}
MLA = {"multi_latent_attention": True}


@pytest.mark.parametrize(
    ("gpu", "config", "fields", "taken"),
    [
        (A100, {}, {}, "flash"),
        (A100, {}, {"flash_attn": False}, None),
        (A100, DETERMINISTIC, {"flash_attn": False}, "unfused"),
        (A100, MLA, {}, None),
        (A100, MLA | DETERMINISTIC, {}, "unfused"),
        (A100, {"attention_backend": "fused"}, {}, "fused"),
        (H100, DETERMINISTIC | DROPOUT, {}, None),
        (GB200, DROPOUT, {}, None),
        (GB200, DETERMINISTIC, {}, None),
        (GB200, DETERMINISTIC | DROPOUT, {}, "flash"),
    ],
)
def test_transformer_engine_takes_what_it_prefers_among_what_can_run(gpu, config, fields, taken):
    assert with_backend(job(config, **fields), gpu).config.get("attention_backend") == taken


@pytest.mark.any_version
@pytest.mark.parametrize(("samples", "more"), [(1, 0), (2, 2 * 2 * UNIT)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_flash_attn_saves_an_output_that_is_copied_if_there_are_several_samples(
    samples, more, ranks
):
    sizes = {"context_parallel_size": ranks}
    fused, flash = (
        records({"attention_backend": backend} | sizes, micro_batch_size=samples)["none"]
        for backend in ("fused", "flash")
    )
    assert flash.held_bytes - fused.held_bytes == more / ranks


def test_a_mask_of_the_data_loader_is_alive_in_forward():
    without, with_mask = (
        profile_job(job(attention_mask_in_dataloader=loaded, micro_batch_size=2), H100, only=())
        for loaded in (False, True)
    )
    for name in ("embedding", "head"):
        old, new = getattr(without, name), getattr(with_mask, name)
        assert new.forward_transient_bytes - old.forward_transient_bytes == 2 * SEQUENCE**2
        assert new.held_bytes == old.held_bytes
        assert new.backward_transient_bytes == old.backward_transient_bytes
