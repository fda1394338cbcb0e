"""Which forwards of a training step count as measured, and which steps cannot be measured."""

import gc
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.policy import RecomputePolicy
from tests.support import (
    MICRO_BATCH_SIZE,
    SEQ_LENGTH,
    VOCAB,
    microbatch,
    start_parallel,
    tiny_config,
    tiny_gpt,
)

pytestmark = pytest.mark.usefixtures("one_rank")


# ------------------------------------------------------------------ forwards beside the schedule's


FREED_LATE_BYTES = 2048
"""An attention mask, or losses, that only a circle of references keeps; a layer's input is eight
times as large."""


def without_gradients(model):
    """An evaluation, or a teacher's or log-prob pass, in the middle of training; of other shape."""
    with torch.no_grad():
        model(**microbatch(7, micro_batch_size=4 * MICRO_BATCH_SIZE))


def inference(model):
    with torch.inference_mode():
        model(**microbatch(7))


def evaluation(model):
    model.eval()
    without_gradients(model)
    model.train()


def never_backward(model):
    """A forward with gradients that nobody asks for."""
    model(**microbatch(7))


@contextmanager
def without_gc():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measured(beside=None, when=("before", "between", "after")):
    """What one step of two microbatches shows of every place, with other forwards beside it."""
    from megatron_autorecompute.compat import parallel
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    (model,) = tiny_gpt(tiny_config(dropout=0.0))
    static = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        static.append(parameter.grad)

    def also(moment):
        if beside is not None and moment in when:
            beside(model)
        gc.collect()  # at moments of its own choice it would free what a forward is charged with

    with apply(RecomputePolicy.parse("full*2,none*2", num_layers=4), model) as applied:
        for _ in range(2):  # the first allocates what stays
            measurement = Measurement(ModelShard([model]), applied)
            static += parallel.global_buffers()
            with without_gc(), LiveBytes(static) as memory, measurement.watch(memory):
                for number in range(2):
                    also("before")
                    loss = model(**microbatch(number)).mean()
                    also("between")
                    loss.backward()
                    also("after")
    assert measurement.boundary_bytes == SEQ_LENGTH * MICRO_BATCH_SIZE * 64 * 4
    seen = measurement.samples.items()
    return {
        key: (of.held_bytes, of.input_bytes, of.forward_level_bytes, of.backward_level_bytes)
        for key, of in seen
    }, {key: (len(of.forward), len(of.backward)) for key, of in seen}


def test_forwards_without_a_backward_are_not_counted():
    def beside(model):
        for forward in (without_gradients, inference, evaluation, never_backward):
            forward(model)

    (bytes_beside, counts_beside), (bytes_alone, counts_alone) = measured(beside), measured()
    assert counts_beside == counts_alone
    for key, seen in bytes_beside.items():
        for values, alone in zip(seen, bytes_alone[key], strict=True):
            assert values == pytest.approx(alone, abs=FREED_LATE_BYTES), key


def test_behind_frozen_parameters_every_layer_has_its_own_backward():
    from megatron_autorecompute.runtime.probe import Probe, spans

    (model,) = tiny_gpt(tiny_config(dropout=0.0))
    model.embedding.requires_grad_(False)
    model.decoder.layers[0].requires_grad_(False)
    with Probe([model], None) as probe:
        model(**microbatch(0)).mean().backward()
    forward, backward = probe.passes
    places = ["embedding", 0, 1, 2, 3, "head"]
    assert [span.place for span in spans(forward)] == places
    assert [span.place for span in spans(backward)] == places[::-1]


def twice(model):
    return model(**microbatch(0)).mean() + model(**microbatch(1)).mean()


def with_layers_run_twice(model):
    layer = model.decoder.layers[1]

    def again(layer, args, kwargs, output):
        hook.remove()
        return layer(**{**kwargs, "hidden_states": output[0]})

    hook = layer.register_forward_hook(again, with_kwargs=True)
    return model(**microbatch()).mean()


def of_nothing(model):
    return torch.zeros(1, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (twice, "through the model with gradients more than once, or in another order"),
        (with_layers_run_twice, "layer 1 runs more than once in one forward"),
        (of_nothing, "no forward of the model had a backward"),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused_with_what_to_do(loss_of, message):
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    (model,) = tiny_gpt(tiny_config())
    with apply(RecomputePolicy.parse("none", num_layers=4), model) as applied:
        measurement = Measurement(ModelShard([model]), applied)
        with (
            pytest.raises(ApplyError, match=rf"{message}.*Give a policy in place of auto"),
            measurement.watch(None),
        ):
            loss_of(model).backward()


def test_gradients_that_come_around_the_output_are_refused():
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    (model,) = tiny_gpt(tiny_config())
    kept = []
    model.register_forward_hook(lambda module, args, output: kept.append(output) or "a word")
    with apply(RecomputePolicy.parse("none", num_layers=4), model) as applied:
        measurement = Measurement(ModelShard([model]), applied)

        def step():
            model(**microbatch())
            kept[0].mean().backward()

        with (
            pytest.raises(ApplyError, match="by another way than what the model returns"),
            measurement.watch(None),
        ):
            step()


# ------------------------------------------------------------- models that return no single tensor


@dataclass
class Output:
    """As transformers' models return it."""

    loss: Any
    logits: Any = None


RETURNED = {
    "a tuple": (lambda losses: (losses, None), lambda output: output[0]),
    "a list": (lambda losses: [losses.detach(), losses], lambda output: output[1]),
    "a dictionary": (lambda losses: {"loss": losses}, lambda output: output["loss"]),
    "a dataclass": (lambda losses: Output(losses), lambda output: output.loss),
}


def gpt_that_returns(kind):
    from megatron.core.models.gpt import GPTModel

    returned, taken = RETURNED[kind]

    class Gpt(GPTModel):
        def forward(self, *args, **kwargs):
            return returned(super().forward(*args, **kwargs))

    (model,) = tiny_gpt(tiny_config())
    model.__class__ = Gpt
    return model, lambda output: taken(output).float().mean()


def bert():
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    torch.manual_seed(0)
    model = BertModel(
        tiny_config(),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
    )
    # The loss of masked words, and the logits of which sentence comes first.
    return model.train(), lambda output: output[0].float().mean() + output[1].float().pow(2).mean()


def bert_microbatch(seed):
    batch = microbatch(seed)
    ones = torch.ones(MICRO_BATCH_SIZE, SEQ_LENGTH, dtype=torch.long)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": ones,
        "tokentype_ids": 0 * ones,
        "lm_labels": batch["labels"],
    }


def trained(kind, with_auto, steps=14):
    """Losses and weights of a run, and the policies of its steps."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    start_parallel()
    model, loss_of = bert() if kind == "BERT" else gpt_that_returns(kind)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32), [ddp]
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model_parallel_cuda_manual_seed(9, force_reset_rng=True)

    def forward_step(batches, model):
        def loss_function(output):
            loss = loss_of(output)
            return loss, {"loss": loss.detach()}

        return model(**next(batches)), loss_function

    def step(number):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        batch_of = bert_microbatch if kind == "BERT" else microbatch
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch_of(2 * number), batch_of(2 * number + 1)]),
            model=ddp,
            num_microbatches=2,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        optimizer.step()
        return [each["loss"].item() for each in reduced]

    losses, policies = [], []
    with tuning(ddp, optimizer) if with_auto else nullcontext() as tuner:
        for number in range(steps):
            with tuner.step() if with_auto else nullcontext():
                losses.append(step(number))
            policies.append(tuner.applied.policy.format() if with_auto else None)
    return losses, [p.detach().clone() for p in model.parameters()], policies


def tuning(ddp, optimizer):
    from megatron_autorecompute.profile import Parallelism
    from megatron_autorecompute.runtime.auto_options import AutoOptions
    from megatron_autorecompute.runtime.controller import Auto, JobFacts

    facts = JobFacts(
        Parallelism(MICRO_BATCH_SIZE, SEQ_LENGTH, dtype="float32"),
        lambda: 2,
        lambda line: None,
        without_cuda=True,
    )
    options = AutoOptions(recompute_memory_budget_gib=1.0)
    return closing(Auto([ddp], optimizer, options, facts))


@pytest.mark.any_version
@pytest.mark.parametrize("kind", ["BERT", *RETURNED])
def test_auto_trains_models_that_return_no_single_tensor_without_changing_a_bit(kind):
    losses, weights, policies = trained(kind, with_auto=True)
    losses_without, weights_without, _ = trained(kind, with_auto=False)
    assert losses == losses_without
    assert all(map(torch.equal, weights, weights_without))
    assert len(set(policies)) > 2  # measured one after the other, then a plan


class Allocator:
    """A memory whose peak is set; resetting it takes it to what is alive."""

    peak_bytes, current_bytes = 100, 40

    def reset_peak(self, leaving_bytes=0):
        self.peak_bytes = self.current_bytes - leaving_bytes


@pytest.mark.parametrize(
    ("fate", "found"),
    [
        # 100 before, 90 after: with its 16 bytes alive 106.
        (lambda gradients: gradients.clear(), (100, 106)),
        (lambda gradients: gradients[0].add_(1), (90, 106)),  # it became the input's gradient
        (lambda gradients: None, (90, 90)),
    ],
    ids=["freed", "reused", "kept"],
)
def test_a_gradient_that_stays_adds_to_what_comes_after_its_end(fate, found):
    from megatron_autorecompute.runtime.probe import OutputGradient

    memory, gradients = Allocator(), [torch.zeros(4)]
    watched = OutputGradient(gradients[0], memory)
    fate(gradients)
    assert memory.peak_bytes == (24 if not gradients else 100)
    assert watched.peaks(90) == found
    memory.peak_bytes = 500
    gradients.clear()  # in the backward of another place, whose peak stays
    assert memory.peak_bytes == 500
