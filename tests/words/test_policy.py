import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_autorecompute.block_names import as_megatrons, parts_of_field, read_file
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import (
    FULL,
    OWN_MODULES,
    LayerPolicy,
    MegatronStrategy,
    RecomputePolicy,
)

MODULES = st.sampled_from(["core_attn", "layernorm", "mlp", "moe", "mla_up_proj", *OWN_MODULES])
OFFLOAD = st.lists(st.sampled_from(["core_attn", "attn_proj", "expert_fc1"]), max_size=3).map(tuple)
CHOICES = st.one_of(
    st.builds(LayerPolicy, offload=OFFLOAD),
    st.builds(
        LayerPolicy,
        st.just("selective"),
        st.lists(MODULES, min_size=1, max_size=4).map(tuple),
        offload=OFFLOAD,
    ),
    st.builds(
        LayerPolicy,
        st.just("selective"),
        st.lists(MODULES, min_size=1, max_size=4).map(tuple),
        rerun_all=st.booleans(),
    ),
    st.builds(
        LayerPolicy,
        st.just("selective"),
        st.lists(MODULES, max_size=3).map(lambda modules: ("moe", *modules)),
        keep=st.just(("dispatch",)),
    ),
    st.builds(
        LayerPolicy,
        st.just("full"),
        group=st.integers(1, 5),
        keep=st.lists(st.sampled_from(["core_attn", "dispatch"])).map(tuple),
        ahead=st.booleans(),
    ),
    st.builds(
        LayerPolicy,
        st.just("full"),
        group=st.integers(1, 5),
        rerun_all=st.booleans(),
        ahead=st.booleans(),
    ),
    st.builds(LayerPolicy, st.sampled_from(["inner", "full"]), inner=st.integers(1, 5)),
)


@st.composite
def policies(draw):
    runs = draw(st.lists(st.tuples(CHOICES, st.integers(1, 6)), min_size=1, max_size=8))
    layers = tuple(choice for choice, count in runs for _ in range(count * choice.group))
    return RecomputePolicy(layers)


@given(policies())
def test_parse_and_format_are_inverses(policy):
    text = policy.format()
    assert RecomputePolicy.parse(text, num_layers=len(policy.layers)) == policy
    assert RecomputePolicy.parse(text, num_layers=len(policy.layers)).format() == text


@given(policies(), policies())
def test_forms_by_block_are_inverses(tower, decoder):
    blocks = {"vision": len(tower.layers), "decoder": len(decoder.layers)}
    both = RecomputePolicy((*tower.layers, *decoder.layers))
    text = both.format(blocks)
    assert text == f"vision:{tower.format()};decoder:{decoder.format()}"
    as_yaml = {"decoder": decoder.to_config(), "vision": tower.format()}
    for form in (text, ";".join(reversed(text.split(";"))), as_yaml):
        read = RecomputePolicy.from_config(form, num_layers=len(both.layers), blocks=blocks)
        assert read == both
    assert RecomputePolicy.parse(both.format(), num_layers=len(both.layers), blocks=blocks) == both


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vision:full;audio:none", r"names audio; .* vision \(2 layers\) and decoder \(4 layers\)"),
        ("vision:full", "says nothing of decoder; .* vision:none\\*2;decoder:none\\*4"),
        ("vision:full*3;decoder:none", "Of vision: full\\*3 covers 3 layers, the model has 2"),
        ("vision:full;vision:none", "write NAME:POLICY for every block"),
        ("vision:full;none*4", "write NAME:POLICY for every block"),
        ("vision:full;decoder:nothing", "Cannot read 'nothing'"),
    ],
)
def test_a_block_that_is_not_there_is_refused_with_those_that_are(text, says):
    with pytest.raises(PolicyError, match=says):
        RecomputePolicy.parse(text, num_layers=6, blocks={"vision": 2, "decoder": 4})


def test_files_name_blocks_and_a_plan_names_its_own(tmp_path):
    blocks, layers = {"vision": 2, "decoder": 4}, ["full"] * 2 + ["none"] * 4
    parts = {"vision": layers[:2], "decoder": layers[2:]}
    model = {"encoder_layers": 2, "encoder_name": "vision"}
    plan = {"recompute_policy": layers, "profile": {"model": model}}
    for content in ("vision:full;decoder:none", parts, {"policy": parts}, plan):
        file = tmp_path / "policy"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        read = RecomputePolicy.parse(f"@{file}", num_layers=6, blocks=blocks)
        assert read.format() == "full*2,none*4"
        assert set(parts_of_field(read_file(file))) == set(blocks)
    for other, says in (
        ({"encoder": 2, "decoder": 4}, "names vision; this model's blocks are encoder"),
        ({"vision": 3, "decoder": 3}, "Of vision: a list of 2 choices covers 2 layers"),
    ):
        with pytest.raises(PolicyError, match=says):
            RecomputePolicy.load(file, num_layers=6, blocks=other)
    assert RecomputePolicy.load(file, num_layers=6).format() == "full*2,none*4"


def test_megatrons_strategies_count_in_their_block():
    policy = RecomputePolicy.parse(
        "vision:megatron:uniform/3;decoder:megatron:block/1",
        num_layers=8,
        layout=[[0, 1, 2, 3], [4, 5], [6, 7]],
        blocks={"vision": 4, "decoder": 4},
    )
    assert policy.format() == "full/3+all*3,full+all*2,none*1,full+all*1,none*1"
    alone = RecomputePolicy.parse("decoder:full*1,none*1", num_layers=2)
    assert alone.format() == "full*1,none*1"


@pytest.mark.parametrize(
    ("value", "runs"),
    [
        ("full", "full+all*4"),
        (
            "full/2*2,selective[core_attn+mlp]*1,none*1",
            "full/2+all*2,selective[core_attn+mlp]+all*1,none*1",
        ),
        ("full+all*2,none+offload[core_attn]*2", "full+all*2,none+offload[core_attn]*2"),
        ("megatron:block/3", "full+all*3,none*1"),
        (
            ["full", "none", "selective[layernorm]", "full+inner/2"],
            "full+all*1,none*1,selective[layernorm]*1,full+inner/2*1",
        ),
        ({"policy": ["full/2", "full/2", "none", "none"]}, "full/2+all*2,none*2"),
        ({"recompute_policy": "full/4"}, "full/4+all*4"),
        ("vision:full*1;decoder:none*1,full/2*2", "full+all*1,none*1,full/2+all*2"),
        (
            {"vision": "full", "decoder": ["none", "full", "selective[moe]"]},
            "full+all*1,none*1,full+all*1,selective[moe]+all*1",
        ),
        ("@FILE", "full+all*1,full/3+all*3"),
    ],
    ids=str,
)
def test_a_policy_as_megatron_runs_it_reruns_all_in_every_layer(value, runs, tmp_path):
    said = value
    if value == "@FILE":
        said = "vision:full;decoder:full/3"
        (tmp_path / "policy").write_text(said)
        value = f"@{tmp_path}/policy"
    blocks = {"vision": 1, "decoder": 3} if parts_of_field(said) else None
    theirs = as_megatrons(value)
    for again in (theirs, as_megatrons(theirs)):
        policy = RecomputePolicy.from_config(again, num_layers=4, blocks=blocks)
        assert policy.format() == runs
    assert set(parts_of_field(as_megatrons(said)) or ()) == set(blocks or ())


@given(policies())
def test_config_form_survives_json(policy):
    value = json.loads(json.dumps(policy.to_config()))
    assert RecomputePolicy.from_config(value, num_layers=len(policy.layers)) == policy


@given(policies(), policies())
def test_digests_differ_exactly_when_policies_differ(left, right):
    assert (left.digest() == right.digest()) == (left == right)


@given(policies())
def test_runs_cover_every_layer_once_and_in_order(policy):
    runs = policy.runs()
    assert [run.policy for run in runs for _ in range(run.count)] == list(policy.layers)
    assert [run.start for run in runs] == [
        sum(run.count for run in runs[:i]) for i in range(len(runs))
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full*2,selective[core_attn]*2", ["full"] * 2 + ["selective[core_attn]"] * 2),
        ("none*4", ["none"] * 4),
        ("full/2*4", ["full/2"] * 4),
        ("full/2", ["full/2"] * 4),
        ("selective[mla_up_proj+mlp]*4", ["selective[mla_up_proj+mlp]"] * 4),
        ("selective[mlp+core_attn+mlp]", ["selective[core_attn+mlp]"] * 4),
        ("none,full*3", ["none"] + ["full"] * 3),
        ("megatron:none", ["none"] * 4),
        ("megatron:selective", ["selective[core_attn]+all"] * 4),
        ("megatron:selective[]", ["none"] * 4),
        ("megatron:selective[mlp+layernorm]", ["selective[layernorm+mlp]+all"] * 4),
        ("megatron:uniform/3", ["full/3+all"] * 3 + ["full+all"]),
        ("megatron:block/2", ["full+all", "full+all", "none", "none"]),
        ("megatron:block/9", ["full+all"] * 4),
        ("none+offload[core_attn+attn_proj]", ["none+offload[attn_proj+core_attn]"] * 4),
        (
            "selective[layernorm]+offload[expert_fc1]*1,none*3",
            ["selective[layernorm]+offload[expert_fc1]"] + ["none"] * 3,
        ),
        ("megatron:offload[core_attn]", ["none+offload[core_attn]"] * 4),
        ("megatron:none+offload[core_attn]", ["none+offload[core_attn]"] * 4),
        (
            "megatron:selective[mlp]+offload[qkv_linear]",
            ["selective[mlp]+offload[qkv_linear]"] * 4,
        ),
        (
            "megatron:cpu_offloading/1",
            ["none+offload[cpu_offloading]"] + ["none"] * 3,
        ),
    ],
)
def test_text_means(text, expected):
    assert RecomputePolicy.parse(text, num_layers=4).to_config() == expected


def test_megatron_strategies_count_afresh_in_every_chunk():
    layout = [(0, 1, 2), (3, 4, 5)]
    block = RecomputePolicy.parse("megatron:block/1", num_layers=6, layout=layout)
    uniform = RecomputePolicy.parse("megatron:uniform/2", num_layers=6, layout=layout)
    assert block.format() == "full+all*1,none*2,full+all*1,none*2"
    assert uniform.format() == "full/2+all*2,full+all*1,full/2+all*2,full+all*1"


def test_multi_token_prediction_follows_uniform_and_ignores_block():
    layout = [(0, 1)]
    uniform = RecomputePolicy.parse("megatron:uniform/1", num_layers=3, layout=layout)
    block = RecomputePolicy.parse("megatron:block/2", num_layers=3, layout=layout)
    assert uniform.to_config() == ["full+all"] * 3
    assert block.to_config() == ["full+all", "full+all", "none"]
    of_stack = {
        text: RecomputePolicy.parse(text, num_layers=3, layout=layout, depth_layers=3).layers[2]
        for text in ("megatron:uniform/1", "megatron:block/2", "megatron:block/9")
    }
    assert [*map(str, of_stack.values())] == ["full+inner/3", "inner/2", "inner/3"]
    with pytest.raises(PolicyError, match="only uniform/1 with multi-token prediction"):
        RecomputePolicy.parse("megatron:uniform/2", num_layers=3, layout=layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full*3", r"full\*3 covers 3 layers, the model has 4"),
        ("full*2,none*3", "covers 5 layers, the model has 4"),
        (f"full*{10**17}", "covers 100000000000000000 layers"),  # and makes no list of them
        (f"full*{'9' * 5000}", "Cannot read 'full"),
        (f"full/{'9' * 5000}*4", "Cannot read 'full"),
        (f"megatron:block/{'9' * 5000}", "Cannot read 'block"),
        ("half*4", r"Cannot read 'half' as a choice\. A choice is none,"),
        ("ful*4", r"Cannot read 'ful' as a choice"),
        ("Full*4", r"In 'Full\*4': Cannot read 'Full' as a choice"),
        ("selective[mlp, Core-Attn]", r"'mlp, Core-Attn' is not a module name such as core_attn"),
        ("@", "names no file: write @FILE"),
        ("selective[]*4", "is not a module name"),
        ("selective[core attn]*4", "'core attn' is not a module name"),
        ("full/0*4", "A group is 1 or more"),
        ("inner*4", "Cannot read 'inner' as a choice"),
        ("inner/0*4", "N being 1 or more layers"),
        ("full/2+inner/1*4", "Cannot read 'full/2"),
        ("full+offload[core_attn]*4", "Offload goes with none and selective: .* only inputs"),
        ("inner/1+offload[core_attn]*4", "Offload goes with none and selective"),
        ("none+offload[]*4", "is not a module name"),
        ("none+offload[mlp norm]*4", "'mlp norm' is not a module name"),
        ("none+offload[cpu_offloading+core_attn]*4", "without other modules"),
        ("megatron:block/2+offload[core_attn]", "Cannot read 'block/2"),
        ("full/3*4", r"full/3 from layer 0 cannot be cut into checkpoints of 3: it has 4 of"),
        ("none*0", "a run has at least one layer"),
        ("none;full", "Cannot read 'none;full'"),
        ("", "Cannot read ''"),
        ("auto", "'auto' is not a policy"),
        ("megatron:uniform/0", "at least one layer in a checkpoint"),
        ("megatron:zigzag", "Cannot read 'zigzag'"),
        (
            "megatron:none*3,full+keep[core_attn]*1",
            r"Layer 3: full\+keep\[core_attn\] as Megatron's own .* they have no core_attn\. Leave",
        ),
        (
            "selective[core_attn+moe]+keep[core_attn]",
            r"\+keep goes with full .* dispatch with selective\[moe\]; found .*keep=\('core_attn',",
        ),
        ("megatron:selective[mlp_act+moe]", "Layer 0: .* they have no mlp_act"),
        ("@nowhere.json", "Cannot read the policy file nowhere.json: No such file"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text, message):
    with pytest.raises(PolicyError, match=message):
        RecomputePolicy.parse(text, num_layers=4)


READERS = (
    LayerPolicy.parse,
    MegatronStrategy.parse,
    partial(RecomputePolicy.parse, num_layers=2),
)


@pytest.mark.parametrize("wrong", [None, 3, b"full", ["full"], Path("full")])
@pytest.mark.parametrize("parse", READERS)
def test_what_is_no_text_is_refused_with_the_grammar(parse, wrong):
    with pytest.raises(PolicyError, match=r"is no text: .*CHOICE\*COUNT"):
        parse(wrong)


@pytest.mark.parametrize("value", [3, [1, 2], {"layers": {}}, [["full"]]])
def test_bad_config_values_are_refused(value):
    with pytest.raises(PolicyError, match="expected text, a list"):
        RecomputePolicy.from_config(value, num_layers=2)


def test_a_checkpoint_cannot_span_two_chunks():
    policy = RecomputePolicy.parse("full/2*4", num_layers=4)
    assert [run.count for run in policy.chunk_runs((0, 1))] == [2]
    with pytest.raises(PolicyError, match=r"it has 3 of layers 0 to 2, .* cannot span two chunks"):
        policy.chunk_runs((0, 1, 2))


@pytest.mark.parametrize(
    "content",
    [
        "full*1,none*1\n",
        '["full", "none"]',
        '{"recompute_policy": ["full", "none"]}',
        "\ufefffull*1,none*1\n",  # as an editor of Windows begins a file
        '\ufeff["full", "none"]',
    ],
)
def test_a_file_holds_text_a_list_or_a_plan(tmp_path, content):
    path = tmp_path / "policy"
    path.write_text(content)
    assert RecomputePolicy.parse(f"@{path}", num_layers=2).format() == "full*1,none*1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'["full", "no', "is not whole JSON"),
        (b"[" + b"9" * 5000 + b"]", "is not whole JSON"),
        (b"[" * 100_000, "is not whole JSON"),
        (b"\x80\x02}q\x00", "is no UTF-8 text"),  # a pickle
    ],
    ids=["half", "a number of 5000 digits", "nested too deep", "binary"],
)
def test_half_a_file_or_another_one_is_refused(tmp_path, content, message):
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        RecomputePolicy.parse(f"@{path}", num_layers=2)


def test_what_is_no_choice_of_a_layer_is_refused():
    with pytest.raises(PolicyError, match=r"'full' is no LayerPolicy.*from_config"):
        RecomputePolicy(["full"])
    with pytest.raises(PolicyError, match="modules is the text 'core_attn': write"):
        LayerPolicy("selective", modules="core_attn")
    with pytest.raises(PolicyError, match="for -1 layers"):
        RecomputePolicy.parse("full", num_layers=-1)


def test_what_is_no_file_or_has_no_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_autorecompute.json_records.MOST_BYTES", 1 << 20)
    large = tmp_path / "large"
    large.write_bytes(b"full," * (1 << 18))
    for path, why in (
        (large, "larger than 1 MiB"),
        ("/dev/zero", "larger than 1 MiB"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null"),
    ):
        with pytest.raises(PolicyError, match=f"Cannot read the policy file .*{why}"):
            RecomputePolicy.parse(f"@{path}", num_layers=6)


@pytest.mark.parametrize(
    "text",
    [
        "megatron:none",
        "megatron:offload[attn_proj+core_attn]",
        "megatron:selective[mlp]+offload[core_attn]",
        "megatron:selective[]+offload[core_attn]",
        "megatron:cpu_offloading/3",
    ],
)
def test_names_of_megatrons_settings_are_read_and_written(text):
    assert str(MegatronStrategy.parse(text)) == text


def test_layer_policies_keep_modules_sorted_and_hash_equal():
    left = LayerPolicy("selective", ("mlp", "core_attn"))
    assert left == LayerPolicy("selective", ("core_attn", "mlp", "mlp"))
    assert len({left, LayerPolicy.parse("selective[mlp+core_attn]"), FULL}) == 2


def test_text_that_names_blocks_is_read_in_a_dict_too():
    blocks = {"vision": 2, "decoder": 3}
    text = "vision:full;decoder:none"
    read = RecomputePolicy.parse(text, num_layers=5, blocks=blocks)
    for key in ("policy", "recompute_policy"):
        assert RecomputePolicy.from_config({key: text}, num_layers=5, blocks=blocks) == read
