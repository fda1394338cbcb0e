"""What recompute ahead saves in real pipelines, against the replay's prediction.

    python -m benchmarks.ahead

Every stage is a gloo process that runs Megatron's own schedule on CPU. A layer sleeps for its
forward and twice as long for its backward, so that two cores stand for any number of devices. The
table is written to `benchmarks/results/ahead.md`: milliseconds of the shortest of some steps with
`full`, of the shortest with `full+ahead`, and what was saved, divided by what the replay predicts.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import replay_ms
from testing.ranks import run_ranks

RESULTS = Path(__file__).parent / "results" / "ahead.md"
CASES: tuple[tuple[int, int | None, int], ...]
CASES = ((2, None, 4), (4, None, 8), (4, None, 16), (8, None, 8), (8, None, 16))
CASES += ((2, 2, 4), (4, 2, 8))
"""Stages, chunks of a stage (None: one), microbatches."""
LAYER_MS = 40.0
LAYERS = 2
"""Of a stage."""
REPEATS = 4
WIDTH, TOKENS, VOCABULARY = 16, 8, 32
HEADER = ("stages", "chunks", "microbatches", "`full` ms", "`full+ahead` ms", "saved", "predicted")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def _chunks(pp: int, vpp: int | None) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS * pp,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=vpp is not None,
        deallocate_pipeline_outputs=vpp is None,
    )
    found = []
    for number in range(vpp or 1):
        where = {} if vpp is None else {"ignore_virtual": False, "vp_stage": number}
        chunk = {} if vpp is None else {"vp_stage": number}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            **chunk,
        )
        found.append(model.train())
    return found


def _slow(layer: Any) -> None:
    forward = layer.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        hidden, context = forward(*args, **kwargs)
        return _Sleep.apply(hidden, LAYER_MS / 1e3), context

    layer.forward = slow


def _forward_step(iterator: Any, model: Any) -> Any:
    return model(**next(iterator)), lambda losses: (losses.mean(), {})


def _step_ms(models: list[Any], num_microbatches: int) -> float:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    batch = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, "labels": ids}
    several = len(models) > 1
    data = [iter([batch] * num_microbatches) for _ in models]
    torch.distributed.barrier()
    start = time.perf_counter()
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if several else data[0],
        model=models if several else models[0],
        num_microbatches=num_microbatches,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    torch.distributed.barrier()
    return (time.perf_counter() - start) * 1e3


def measured(pp: int, vpp: int | None, num_microbatches: int) -> list[float]:
    """Of this rank: the shortest step with `full` and with `full+ahead`, ms."""
    warnings.simplefilter("ignore")
    from megatron_autorecompute.runtime.apply import apply

    models = _chunks(pp, vpp)
    for model in models:
        for layer in model.decoder.layers:
            _slow(layer)
    texts = ("full", "full+ahead")
    found: dict[str, list[float]] = {text: [] for text in texts}
    with apply("full", models) as applied:
        _step_ms(models, num_microbatches)
        for text in texts * REPEATS:  # by turns, because the machine is not always as fast
            applied.switch(text)
            found[text].append(_step_ms(models, num_microbatches))
    return [min(found[text]) for text in texts]


def predicted_ms(pp: int, vpp: int | None, num_microbatches: int) -> float:
    """What the replay says is saved."""
    v = vpp or 1
    schedule, own = Schedule(pp, v, num_microbatches), LAYER_MS * LAYERS / v
    forward, backward = [[own] * v] * pp, [[3 * own] * v] * pp
    ahead = [*[[own] * v] * (pp - 1), [*[own] * (v - 1), 0.0]]
    plain = replay_ms(schedule, forward, backward)
    return plain - replay_ms(schedule, forward, backward, ahead)


def main() -> None:
    lines = ["| " + " | ".join((*HEADER, "saved / predicted")) + " |", "|---" * 8 + "|"]
    for pp, vpp, m in CASES:
        plain, early = run_ranks(measured, pp, pp, vpp, m, timeout_s=600)[0]
        saved, said = plain - early, predicted_ms(pp, vpp, m)
        row = pp, vpp or 1, m, *(f"{ms:.0f}" for ms in (plain, early, saved, said))
        lines.append("| " + " | ".join(map(str, (*row, f"{saved / said:.2f}"))) + " |")
        print(lines[-1], flush=True)
    about = (
        f"Written by `python -m benchmarks.ahead`: {LAYERS} layers a stage, each {LAYER_MS:.0f} ms "
        f"of sleep in a forward and twice that in a backward; the shortest of {REPEATS} steps.\n\n"
    )
    RESULTS.write_text(about + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
