"""The options of auto: one dataclass, the flags made from it, and what is refused."""

import argparse
import dataclasses

import pytest

from megatron_autorecompute.errors import AutorecomputeError, OptionError
from megatron_autorecompute.options import add_flags, from_flags
from megatron_autorecompute.runtime.auto_options import AutoOptions, budget_bytes

pytestmark = pytest.mark.any_version


def parsed(*flags: str) -> AutoOptions:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, AutoOptions)
    return from_flags(AutoOptions, parser.parse_args(flags))


def test_no_flag_gives_the_dataclass_defaults():
    assert parsed() == AutoOptions()


def test_every_option_is_a_flag_of_its_own_name_with_help():
    parser = argparse.ArgumentParser()
    add_flags(parser, AutoOptions)
    text = parser.format_help()
    for field in dataclasses.fields(AutoOptions):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"]
        assert field.name.startswith("recompute_")  # Megatron's namespace is one flat one


def test_flags_reach_the_fields_with_their_types():
    options = parsed(
        *("--recompute-memory-budget-gib", "72.5"),
        *("--recompute-plan-path", "plan.json"),
        *("--recompute-measure-steps", "6"),
        *("--recompute-imbalance-percentile", "95"),
        "--recompute-plan-only",
    )
    assert options == AutoOptions(
        recompute_memory_budget_gib=72.5,
        recompute_plan_path="plan.json",
        recompute_measure_steps=6,
        recompute_imbalance_percentile=95.0,
        recompute_plan_only=True,
    )


def test_gib_are_powers_of_two():
    assert AutoOptions(recompute_memory_budget_gib=1.5).budget_bytes == 3 * 2**29
    assert AutoOptions().budget_bytes is None
    for reserve_gib, left in ((0.0, 2**31), (1.5, 2**29), (None, 2**31 - 7)):
        options = AutoOptions(recompute_memory_reserve_gib=reserve_gib)
        assert budget_bytes(options, available_bytes=2**31, fragmentation_bytes=7) == left


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recompute_memory_budget_gib": 0.0}, "above 0"),
        ({"recompute_memory_budget_gib": -8.0}, "above 0"),
        ({"recompute_memory_budget_gib": float("nan")}, "above 0"),
        ({"recompute_memory_budget_gib": float("inf")}, "above 0"),
        ({"recompute_memory_reserve_gib": -1.0}, "0 or more"),
        ({"recompute_memory_reserve_gib": float("nan")}, "0 or more"),
        ({"recompute_imbalance_percentile": 0.0}, "above 0 and at most 100"),
        ({"recompute_imbalance_percentile": 100.5}, "above 0 and at most 100"),
        ({"recompute_imbalance_percentile": float("nan")}, "above 0 and at most 100"),
        ({"recompute_measure_steps": 0}, "give 1 or more"),
        (
            {"recompute_memory_budget_gib": 70.0, "recompute_memory_reserve_gib": 2.0},
            "Leave one of them out",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_naming_the_flag(values, message):
    with pytest.raises(OptionError, match=message) as refused:
        AutoOptions(**values)
    for name in values:
        assert f"--{name.replace('_', '-')}" in str(refused.value)


def test_option_errors_have_an_exit_code_of_their_own():
    codes = [kind.exit_code for kind in AutorecomputeError.__subclasses__()]
    assert codes.count(OptionError.exit_code) == 1


def test_importing_the_options_imports_neither_torch_nor_megatron():
    import subprocess
    import sys

    code = (
        "import sys, megatron_autorecompute.integrations.megatron_lm, "
        "megatron_autorecompute.runtime.auto_options; "
        "sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    proof = code.replace("import sys,", "import sys, torch,")
    assert subprocess.run([sys.executable, "-c", proof]).returncode == 1


def test_a_plan_goes_beside_the_checkpoints_unless_the_user_names_a_place():
    asked = AutoOptions(recompute_plan_path="mine.json")
    assert asked.with_plan_in("checkpoints") == asked
    assert AutoOptions().with_plan_in(None) == AutoOptions()
    default = AutoOptions().with_plan_in("checkpoints")
    assert default.recompute_plan_path == "checkpoints/recompute-plan.json"
