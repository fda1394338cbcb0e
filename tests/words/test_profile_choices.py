"""Megatron's own choices of a profile, as its checkpoints run them."""

from megatron_autorecompute.profile import ChoiceRecord, LayerKind, StaticBytes


def kind(*choices, inert=None):
    records = tuple(ChoiceRecord(choice, 1, 0, 0, 1.0, 2.0) for choice in choices)
    return LayerKind("dense", (0,), records, inert or {}, static=StaticBytes())


def names(found):
    return [record.choice for record in found.choices]


def test_megatrons_choices_are_those_that_rerun_all_and_keep_no_part():
    measured = kind(
        "none",
        "full",
        "full+all",
        "full+keep[core_attn]",
        "selective[layernorm]",
        "selective[mlp]",
        "selective[mlp]+all",
        "selective[mlp_act]",
    )
    assert names(measured.as_megatron()) == [
        "none",
        "full+all",
        "selective[layernorm]",
        "selective[mlp]+all",
    ]


def test_without_a_record_of_all_of_it_ours_says_the_least_that_megatrons_takes():
    measured = kind("none", "full", "selective[mlp]", inert={"selective[layernorm]": "none"})
    assert names(measured.as_megatron()) == ["none", "full", "selective[mlp]"]
    assert measured.record("full+all") == measured.record("full")
    assert measured.as_megatron().inert == {"selective[layernorm]": "none"}
