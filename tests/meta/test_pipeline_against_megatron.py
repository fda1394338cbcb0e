"""Layout and schedule against megatron-core's own functions, and against recorded runs of it."""

import contextlib
import itertools
import random

import pytest
import torch

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    CHUNKS,
    FIRST,
    LAST,
    TEXT,
    layout_flags,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from testing.ranks import run_ranks
from tests.planner.asked import searched_layouts
from tests.support import (
    SEQ_LENGTH,
    forward_step,
    microbatch,
    start_parallel,
    tiny_config,
    tiny_gpt,
)

# 0.16's TransformerConfig warns of its own default, 0.19 where no launcher has set RANK.
pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")

MICROBATCHES = (1, 2, 3, 5, 8, 13, 16, 24, 33, 64)


@pytest.fixture(scope="module")
def core():
    """Run Megatron's functions in this process, without CUDA."""
    with without_cuda.activate():
        yield


@pytest.fixture
def become(core, monkeypatch):
    """Return a function that makes Megatron believe to be one stage of a pipeline."""
    from megatron.core import parallel_state

    def as_stage(pp, rank, vp):
        prefix = "_MPU_PIPELINE_MODEL_PARALLEL_"
        monkeypatch.setattr(parallel_state, prefix + "WORLD_SIZE", pp)
        monkeypatch.setattr(parallel_state, prefix + "RANK", rank)
        virtual = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
        monkeypatch.setattr(parallel_state, virtual, vp if vp > 1 else None)

    return as_stage


def triples(schedule, stage):
    return [(event.direction, event.chunk, event.microbatch) for event in schedule.events(stage)]


# Megatron's own functions


def schedule_grid():
    sizes = itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 8), MICROBATCHES, (0, 1, 3, 5, 8))
    for p, v, m, extra in sizes:
        for overlap in (False, True):
            try:
                yield Schedule(p, v, m, p + extra, overlap)
            except PipelineError:
                continue


def events_by_megatron(schedule):
    """Put together as `forward_backward_pipelining_with_interleaving` does."""
    from megatron.core.pipeline_parallel import schedules

    m, v, group = schedule.num_microbatches, schedule.num_chunks, schedule.group_size
    total, _, warmup, remaining = schedules.get_pp_rank_microbatches(
        m, v, group, overlap_moe_expert_parallel_comm=schedule.overlap_moe_expert_parallel_comm
    )
    table = schedules.get_schedule_table(m, v, group)
    forwards = [("forward", chunk, index) for index, chunk in table]
    backwards = [("backward", v - 1 - chunk, index) for index, chunk in table]
    events = forwards[:warmup]
    for step in range(remaining):
        events += [forwards[warmup + step], backwards[step]]
    return events + backwards[remaining:total]


def test_schedule_equals_megatrons_warmup_and_table_on_a_grid(become):
    checked = 0
    for schedule in schedule_grid():
        if schedule.num_stages == 1 and schedule.overlap_moe_expert_parallel_comm:
            continue  # not decided by these functions: recorded below
        for stage in range(schedule.num_stages):
            become(schedule.num_stages, stage, schedule.num_chunks)
            expected = events_by_megatron(schedule)
            assert triples(schedule, stage) == expected, (schedule, stage)
        checked += 1
    assert checked >= 900


def layout_grid():
    """Yield keyword arguments of Layout.from_flags, right and wrong ones."""
    for layers, p, v in itertools.product(range(1, 27), (1, 2, 3, 4, 6), (1, 2, 3)):
        if p == 1 and v > 1:
            continue  # Megatron ignores the chunks then, we refuse
        base = {"num_layers": layers, "pp": p, "vp": v}
        yield base
        yield base | {"mtp_num_layers": 1 + layers % 2}
        for first, last in ((2, None), (None, 1), (2, 4), (6, 3)):
            both = None not in (first, last)
            # Megatron loses layers where it should refuse: one stage that has two numbers of
            # layers, or fewer than none between first and last.
            if (first or 0) + (last or 0) <= layers and not (p == 1 and both):
                yield base | {
                    "num_layers_in_first_pipeline_stage": first,
                    "num_layers_in_last_pipeline_stage": last,
                }
        for embedding, loss in ((True, False), (False, True), (True, True)):
            yield base | {
                "account_for_embedding_in_pipeline_split": embedding,
                "account_for_loss_in_pipeline_split": loss,
            }


def layout_texts():
    """Yield (text, pp): random ones, about half of them wrong in one place."""
    generator = random.Random(3)
    for _ in range(600):
        p, v = generator.randint(2, 5), generator.randint(1, 4)
        rows = ["t" * generator.randint(0, 3) for _ in range(p * v)]
        rows[0] = "E" + rows[0]
        mtp_row = generator.choice([*range(len(rows) - p, len(rows)), len(rows) - 1])
        if generator.random() < 0.5 and not any("t" in row for row in rows[mtp_row + 1 :]):
            rows[mtp_row] += "m" * generator.randint(1, 2)
        rows[-1] += "L"
        text = "|".join(rows).replace("ttt", "t*3").replace("|||", "|*3")
        if generator.random() < 0.5:
            place = generator.randrange(len(text))
            text = text[:place] + generator.choice("EtmL|,x(*2") + text[place + 1 :]
        yield text, p


def config_of(arguments):
    from megatron.core.transformer import TransformerConfig

    arguments = dict(arguments)
    p, v = arguments.pop("pp"), arguments.pop("vp")
    return TransformerConfig(
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
        pipeline_dtype=torch.float32,
        mtp_num_layers=arguments.pop("mtp_num_layers", 0) or None,
        **arguments,
    )


def chunks_by_megatron(config, become):
    """Return the layers of every chunk, `[stage][chunk]`."""
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    vp = config.virtual_pipeline_model_parallel_size
    stages = []
    for stage in range(config.pipeline_model_parallel_size):
        become(config.pipeline_model_parallel_size, stage, vp or 1)
        chunks = []
        for chunk in range(vp or 1):
            vp_stage = chunk if vp else None
            start = get_transformer_layer_offset(config, vp_stage, stage)
            layers = [*range(start, start + get_num_layers_to_build(config, vp_stage, stage))]
            start = config.num_layers + mtp.get_mtp_layer_offset(config, vp_stage)
            count = mtp.get_mtp_num_layers_to_build(config, vp_stage, stage)
            chunks.append((*layers, *range(start, start + count)))
        stages.append(tuple(chunks))
    return tuple(stages)


def ours_or_none(make):
    try:
        layout = make()
    except PipelineError:
        return None
    assert layout.stages[0][0].embedding
    assert layout.stages[-1][-1].head
    return tuple(tuple(chunk.layers for chunk in chunks) for chunks in layout.stages)


def megatrons_or_none(arguments, become):
    try:
        return chunks_by_megatron(config_of(arguments), become)
    except (AssertionError, ValueError, ZeroDivisionError):
        return None


def test_layout_equals_megatrons_layer_offsets_or_both_refuse_on_a_grid(become):
    accepted = refused = 0
    for arguments in layout_grid():
        ours = ours_or_none(lambda arguments=arguments: Layout.from_flags(**arguments))
        assert ours == megatrons_or_none(arguments, become), arguments
        accepted, refused = accepted + (ours is not None), refused + (ours is None)
    assert accepted >= 500
    assert refused >= 500


def test_layout_text_reads_as_megatron_reads_it_or_both_refuse(become):
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    accepted = refused = 0
    for text, p in layout_texts():
        ours = ours_or_none(lambda text=text, p=p: Layout.parse(text, p))
        try:
            flat = PipelineParallelLayerLayout(text, p).flatten_layout
        except AssertionError:
            assert ours is None, (text, p)
            refused += 1
            continue
        counts = [[layer.name for layer in flat].count(name) for name in ("decoder", "mtp")]
        arguments = {"num_layers": counts[0], "pp": p, "vp": 1, "mtp_num_layers": counts[1]}
        arguments |= {"pipeline_model_parallel_layout": text}
        assert ours == megatrons_or_none(arguments, become), (text, p)
        accepted, refused = accepted + (ours is not None), refused + (ours is None)
    assert accepted >= 200
    assert refused >= 100


# Flags of searched layouts


def read_by_map(layout, flags):
    """Megatron's config of these flags, each put into the field that its arguments.py maps to."""
    fields = {FIRST: "num_layers_in_first_pipeline_stage", TEXT: "pipeline_model_parallel_layout"}
    fields |= {LAST: "num_layers_in_last_pipeline_stage"}
    arguments = {"num_layers": layout.num_layers, "pp": layout.num_stages, "vp": 1}
    arguments |= {fields[n]: v if n == TEXT else int(v) for n, v in flags.items() if n in fields}
    return config_of(
        {**arguments, "vp": int(flags.get(CHUNKS, 1)), "mtp_num_layers": layout.mtp_num_layers}
    )


def test_flags_of_searched_layouts_are_built_by_megatron_as_they_were_planned(become):
    built = set()
    for shape in ((2, 1, 4, 0), (3, 1, 4, 1), (4, 1, 5, 0), (2, 2, 12, 0), (3, 2, 12, 2)):
        for layout in searched_layouts(*shape):
            flags = layout_flags(layout)
            found = chunks_by_megatron(read_by_map(layout, flags), become)
            assert found == ours_or_none(lambda layout=layout: layout), (shape, flags)
            built.add((*sorted(flags), layout.num_chunks))
    assert len(built) == 4


# Recorded runs


class Recorder:
    """Notes every forward of a chunk, and by a hook on its output every backward."""

    def __init__(self, models):
        self.models, self.events, self.begun = models, [], [0] * len(models)

    def note(self, kind, chunk, index):
        self.events.append((kind, chunk, index))

    def step(self, iterator, model):
        chunk = next(i for i, candidate in enumerate(self.models) if candidate is model)
        index, self.begun[chunk] = self.begun[chunk], self.begun[chunk] + 1
        self.note("forward", chunk, index)
        output, loss_function = forward_step(iterator, model)
        output.register_hook(lambda _: self.note("backward", chunk, index))
        return output, loss_function


def run_recorded(models, num_microbatches, batch):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    recorder, several = Recorder(models), len(models) > 1
    iterators = [itertools.repeat(batch) for _ in models]
    get_forward_backward_func()(
        forward_step_func=recorder.step,
        data_iterator=iterators if several else iterators[0],
        model=models if several else models[0],
        num_microbatches=num_microbatches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return recorder.events


def sizes_of(schedule):
    return {
        "pipeline_model_parallel_size": schedule.num_stages,
        "virtual_pipeline_model_parallel_size": (
            schedule.num_chunks if schedule.num_chunks > 1 else None
        ),
    }


def config_for(schedule):
    return tiny_config(
        num_layers=schedule.num_stages * schedule.num_chunks,
        microbatch_group_size_per_vp_stage=schedule.microbatch_group_size,
        **sizes_of(schedule),
    )


def record_gpt(schedules):
    """Runs in each rank: a step of a real GPTModel for each schedule."""
    recorded = []
    for schedule in schedules:
        start_parallel(**sizes_of(schedule))
        models = tiny_gpt(config_for(schedule))
        recorded.append(run_recorded(models, schedule.num_microbatches, microbatch()))
    return recorded


@pytest.mark.parametrize(
    "schedules",
    [
        [Schedule(2, 1, 5), Schedule(2, 2, 4), Schedule(2, 2, 5, 3), Schedule(2, 3, 4)],
        [Schedule(4, 1, 6), Schedule(4, 1, 2)],
    ],
    ids=["2 stages", "4 stages"],
)
def test_real_processes_run_the_replayed_events(schedules):
    recorded = run_ranks(record_gpt, schedules[0].num_stages, schedules)
    for stage, of_stage in enumerate(recorded):
        for schedule, events in zip(schedules, of_stage, strict=True):
            assert events == triples(schedule, stage), (schedule, stage)


class Piece(torch.nn.Module):
    """The least that Megatron's schedules accept as a chunk: one linear layer."""

    def __init__(self, config, first):
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.first, self.model_type = config, first, ModelType.encoder_or_decoder
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def set_input_tensor(self, tensors):
        self.received = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, hidden_states):
        # Not a view, as a linear layer's output would be: Megatron refuses to free those.
        return self.linear(hidden_states if self.first else self.received).relu()


@contextlib.contextmanager
def pretended_stage(schedule, stage):
    """Be one rank of a world that exists in name only, on meta tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=stage, world_size=schedule.num_stages
    )
    with without_cuda.activate(meta=True), torch.device("meta"):
        start_parallel(create_gloo_process_groups=False, **sizes_of(schedule))
        yield


def record_alone(cases):
    """Runs in one process: one step of single stages of many."""
    recorded = []
    for schedule, stage in cases:
        with pretended_stage(schedule, stage):
            recorded.append(record_stage(schedule, stage))
    return recorded


def record_stage(schedule, stage):
    config = config_for(schedule)
    config.overlap_moe_expert_parallel_comm = schedule.overlap_moe_expert_parallel_comm
    models = [Piece(config, stage == chunk == 0) for chunk in range(schedule.num_chunks)]
    hidden_states = torch.zeros(SEQ_LENGTH, 2, config.hidden_size)
    if schedule.overlap_moe_expert_parallel_comm:
        return record_overlapped(models, schedule.num_microbatches, hidden_states)
    return run_recorded(models, schedule.num_microbatches, {"hidden_states": hidden_states})


def record_overlapped(models, num_microbatches, hidden_states):
    """As run_recorded, with a stand-in for the step that runs a forward beside a backward.

    The real one needs a MoE GPTModel's schedule plan; which forward and backward it is given, and
    when, is decided before by the code under test.
    """
    from megatron.core.pipeline_parallel import combined_1f1b

    events = []

    def step(func, iterator, f_model, n, f_input, store, b_model, *rest, **options):
        for kind, model in (("forward", f_model), ("backward", b_model)):
            if model is None:
                continue
            chunk = models.index(model)
            seen = sum(event[:2] == (kind, chunk) for event in events)
            assert kind == "backward" or seen == options["current_microbatch"]
            events.append((kind, chunk, seen))
            if options.get(f"pre_{kind}") is not None:  # these receive and send
                options[f"pre_{kind}"]()
                options[f"post_{kind}"](hidden_states)
        return hidden_states, torch.zeros([], dtype=torch.int), hidden_states

    combined_1f1b.combined_forward_backward_step = step
    run_recorded(models, num_microbatches, None)
    return events


ALONE = [
    (Schedule(p, v, m, group, overlap), stage)
    for p, v, m, group, overlap in [
        (1, 1, 3, None, False),
        (8, 1, 16, None, False),
        (16, 1, 7, None, False),
        (16, 1, 40, None, False),
        (4, 2, 8, None, False),
        (4, 3, 13, 8, False),
        (3, 4, 11, 4, False),
        (8, 4, 24, None, False),
        (16, 4, 16, None, False),
        (16, 2, 48, 24, False),
        (1, 1, 1, None, True),
        (1, 1, 4, None, True),
        (4, 2, 8, None, True),
        (8, 3, 24, 12, True),
    ]
    for stage in sorted({0, p // 2, p - 1})
]


@pytest.mark.any_version
def test_single_stages_of_many_run_the_replayed_events():
    (recorded,) = run_ranks(record_alone, 1, ALONE, activate=False)
    for (schedule, stage), events in zip(ALONE, recorded, strict=True):
        assert events == triples(schedule, stage), (schedule, stage)


def groups_megatron_accepts(num_stages, most):
    """Runs in one process: steps with every number of microbatches and group size up to `most`."""
    accepted = set()
    schedule = Schedule(num_stages, 2, num_stages)
    with pretended_stage(schedule, 1):
        config = config_for(schedule)
        models = [Piece(config, False), Piece(config, False)]
        for m, group in itertools.product(range(1, most + 1), repeat=2):
            config.microbatch_group_size_per_vp_stage = group
            with contextlib.suppress(ValueError, RuntimeError):
                run_recorded(models, m, {"hidden_states": None})
                accepted.add((m, group))
    return accepted


def test_group_sizes_are_accepted_where_megatron_runs_them():
    (accepted,) = run_ranks(groups_megatron_accepts, 1, 3, 10, activate=False)
    ours = set()
    for m, group in itertools.product(range(1, 11), repeat=2):
        with contextlib.suppress(PipelineError):
            Schedule(3, 2, m, group)
            ours.add((m, group))
    assert ours == accepted
    assert len(ours) == 18
