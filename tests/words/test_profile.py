import json
import os
import re
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import (
    BytesAt,
    ChoiceRecord,
    HostLink,
    Imbalance,
    LayerKind,
    OffloadGroup,
    Profile,
)
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import uniform_profile


@pytest.fixture
def data():
    profile, _, _, _ = drawn(7)
    return json.loads(profile.to_json())


def refusal(data):
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(json.dumps(data))
    return str(caught.value)


def test_json_round_trip_gives_the_same_profile():
    for seed in range(50):
        profile, _, _, _ = drawn(seed)
        assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-3, "-3, must be ≥ 0"),
        (1.5, "1.5, must be a valid integer"),
        ("12", "'12', must be a valid integer"),
        (None, "None, must be a valid integer"),
        (True, "True, must be a valid integer"),
        (10**30, f"{10**30}, must be ≤ {1 << 44}"),
    ],
)
def test_a_bad_byte_count_is_refused_with_its_path(data, value, reason):
    data["kinds"][1]["choices"][0]["held_bytes"] = value
    assert f"kinds[1].choices[0].held_bytes: {reason}" in refusal(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 1e300])
def test_a_bad_time_is_refused_with_its_path(data, value):
    data["head"]["backward_ms"] = value
    assert "head.backward_ms: " in refusal(data)


def test_a_figure_beyond_every_model_is_refused_with_its_path(data):
    data["model"]["num_layers"] = 10**30
    data["kinds"][0]["imbalance"] = [{"percentile": 99.0, "factor": 1e300}]
    data["stages"] = [{"layers": [], "static": {}, "residual_bytes": -(10**30)}]
    message = refusal(data)
    for path in ("model.num_layers", "kinds[0].imbalance[0].factor", "stages[0].residual_bytes"):
        assert f"  {path}: " in message


def test_a_missing_field_is_refused_with_its_path(data):
    del data["parallelism"]["seq_length"]
    assert "parallelism.seq_length: missing, must be given" in refusal(data)


def test_every_bad_field_is_named_at_once(data):
    data["boundary_bytes"] = -1
    data["model"]["num_layers"] = -1
    message = refusal(data)
    assert "boundary_bytes" in message
    assert "model.num_layers" in message


def test_contradictions_between_fields_are_refused(data):
    again = json.loads(json.dumps(data))
    again["kinds"][1]["layers"] = again["kinds"][0]["layers"]
    assert "are not in exactly one kind" in refusal(again)
    missing = json.loads(json.dumps(data))
    missing["model"]["num_layers"] += 1
    assert "are not in exactly one kind" in refusal(missing)
    extra = json.loads(json.dumps(data))
    extra["kinds"][0]["layers"].append(99)
    assert "layers [99] are not in exactly one kind" in refusal(extra)
    twice = json.loads(json.dumps(data))
    twice["kinds"][0]["choices"].append(twice["kinds"][0]["choices"][0])
    assert "has two records" in refusal(twice)
    inert = json.loads(json.dumps(data))
    inert["kinds"][0]["inert"] = {"selective[moe]": "selective[nothing]"}
    assert "kinds[0]: " in refusal(inert)
    head = json.loads(json.dumps(data))
    head["head"]["choice"] = "full"
    assert "must be 'none'" in refusal(head)


def test_fields_of_a_newer_minor_version_are_ignored(data):
    before = Profile.from_json(json.dumps(data))
    data["kinds"][0]["choices"][0]["colour"] = "blue"
    data["later"] = {"a": 1}
    assert Profile.from_json(json.dumps(data)) == before


def test_a_newer_major_version_is_refused_before_its_fields_are(data):
    data["schema_version"] = 2
    data["boundary_bytes"] = "in another unit"
    message = refusal(data)
    assert "schema_version 2" in message
    assert "Upgrade" in message


def test_a_cut_off_file_is_refused(data):
    with pytest.raises(ProfileError, match="not whole JSON"):
        Profile.from_json(json.dumps(data)[:-20])


def test_a_record_that_would_not_be_read_is_not_written(tmp_path):
    profile, _, _, _ = drawn(7)
    object.__setattr__(profile, "boundary_bytes", -1)
    with pytest.raises(ProfileError, match="boundary_bytes: -1"):
        profile.save(tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    first, _, _, _ = drawn(7)
    first.save(path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ProfileError, match="disk full"):
        drawn(8)[0].save(path)
    assert Profile.load(path) == first
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_an_unreadable_path_is_a_profile_error(tmp_path):
    with pytest.raises(ProfileError, match="Cannot read"):
        Profile.load(tmp_path / "absent.json")
    with pytest.raises(ProfileError, match="Cannot write"):
        drawn(7)[0].save(tmp_path / "no" / "folder.json")


def test_a_path_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path):
    with pytest.raises(ProfileError) as caught:
        drawn(7)[0].save(tmp_path / "no" / "p.json")
    path = tmp_path / "no" / "p.json"
    assert str(caught.value) == (
        f"Cannot write {path}: No such file or directory. Give a writable path."
    )
    with pytest.raises(ProfileError, match="'': it names no file"):
        drawn(7)[0].save("")


def test_an_inert_choice_has_the_record_of_what_it_equals():
    none = ChoiceRecord("none", 5, 0, 0, 1.0, 2.0)
    kind = LayerKind("k", (0,), (none,), inert={"selective[core_attn]": "none"})
    assert kind.record("selective[core_attn]") is none
    assert kind.record("full") is None


def test_imbalance_takes_the_recorded_percentile_at_or_above_the_asked_one():
    none = ChoiceRecord("none", 5, 0, 0, 1.0, 2.0)
    points = (Imbalance(99.0, 1.5), Imbalance(50.0, 1.1))
    kind = LayerKind("moe", (0,), (none,), imbalance=points)
    assert [kind.imbalance_factor(p) for p in (None, 40.0, 50.0, 51.0, 99.9)] == [
        1.0,
        1.1,
        1.1,
        1.5,
        1.5,
    ]


def test_a_record_takes_the_bytes_of_the_recorded_percentile_at_or_above_the_asked_one():
    points = (BytesAt(100.0, 9, 3, 3), BytesAt(50.0, 5, 1, 2))
    record = ChoiceRecord("none", 9, 3, 3, 1.0, 2.0, percentiles=points)
    assert [record.at_percentile(p).held_bytes for p in (None, 40.0, 50.0, 51.0, 100.0)] == [
        9,
        5,
        5,
        9,
        9,
    ]
    assert record.at_percentile(50.0).backward_transient_bytes == 2


def with_times(**times_ms):
    """A kind of which each choice takes so long, half of it in forward."""
    names = {"mlp": "selective[mlp]", "attention_and_mlp": "selective[core_attn+mlp]"}
    return [
        {
            "choice": names.get(name, name.replace("_", "/")),
            "held_bytes": 1,
            "forward_transient_bytes": 0,
            "backward_transient_bytes": 0,
            "forward_ms": ms / 2,
            "backward_ms": ms / 2,
        }
        for name, ms in times_ms.items()
    ]


@pytest.mark.parametrize(
    ("times_ms", "said"),
    [
        ({"none": 10, "full": 9}, "full takes 9 ms a layer .* none with 10 ms"),
        ({"mlp": 10, "attention_and_mlp": 8}, "core_attn.mlp. takes 8 ms .*.mlp. with 10 ms"),
        ({"none": 10, "full_4": 32}, "full/4 takes 8 ms a layer .* none with 10 ms"),
    ],
)
def test_a_choice_that_is_cheaper_than_one_it_contains_is_refused(data, times_ms, said):
    data["kinds"][0]["choices"] = with_times(**times_ms)
    message = refusal(data)
    assert re.search(rf"kinds\[0\]: kind 'kind0': .*{said}", message), message


@pytest.mark.parametrize(
    "times_ms",
    [
        {"none": 10, "full": 10},
        {"none": 10, "full": 9.995},  # rounded
        {"full": 15, "full_4": 50},  # one checkpoint instead of four
        {"attention_and_mlp": 10, "full": 8},  # one instead of two, where a host launches them
        {"full": 15, "attention_and_mlp": 12, "mlp": 11, "none": 10},
    ],
)
def test_equal_times_rounding_and_cheaper_groups_are_no_contradiction(data, times_ms):
    data["kinds"][0]["choices"] = with_times(**times_ms)
    assert Profile.from_json(json.dumps(data)).kinds[0].choices[0].held_bytes == 1


def test_offload_groups_are_of_the_choice_in_the_order_of_their_copies_and_survive_json():
    early = OffloadGroup("core_attn", 3, 4, 0.3, 0.6, 0.9)
    late = OffloadGroup("moe_act", 5, 5, 0.8, 0.1, 0.2)
    choice, groups = "none+offload[core_attn+moe_act]", (early, late)
    record = ChoiceRecord(choice, 9, 1, 1, 1.0, 2.0, offload_groups=groups)
    profile = replace(uniform_profile(2, record), host_link=HostLink(25.0, 24.0, 1 << 36))
    assert Profile.from_json(profile.to_json()) == profile
    assert record.host_bytes == 9
    with pytest.raises(ValueError, match=r"in the order of forward_end; found \[0.8, 0.3\]"):
        replace(record, offload_groups=(late, early))
    with pytest.raises(ValueError, match=r"has a group 'moe_act'; its groups can be of core_attn$"):
        replace(record, choice="none+offload[core_attn]")
    with pytest.raises(ValueError, match=r"backward_end 0.2 is before backward_begin 0.6"):
        replace(early, backward_end=0.2)


def test_what_is_wrong_again_and_again_is_said_a_few_times(data):
    stages = [{"layers": [0], "static": {}, "residual_ms": f"late {n}"} for n in range(500)]
    said = refusal({**data, "stages": stages}).splitlines()
    assert said[1].startswith("  stages[0].residual_ms: 'late 0'")
    assert len(said) == 10
    assert "more like these" in said[-1]


def test_a_mark_before_the_text_is_none_of_it(data, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(data).encode())
    assert Profile.load(path) == Profile.from_json(json.dumps(data))


@pytest.mark.parametrize("record", [Profile, Plan])
def test_a_path_or_a_text_that_is_none_is_refused(record):
    for wrong in (None, 3):
        with pytest.raises(ProfileError, match=f"Cannot read {wrong}: expected str"):
            record.load(wrong)
        with pytest.raises(ProfileError, match=r"is not whole JSON, .*: the JSON object"):
            record.from_json(wrong)
    with pytest.raises(ProfileError, match="Cannot read '': No such file"):
        record.load("")


def test_a_profile_is_not_saved_under_no_name():
    with pytest.raises(ProfileError, match="Cannot write None: "):
        drawn(1)[0].save(None)
