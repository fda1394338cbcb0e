"""Some of the damaged inputs of `tests.cli.fuzz`, which runs any number of them."""

from collections import Counter

import pytest

from tests.cli import fuzz

pytestmark = pytest.mark.any_version


def test_damaged_files_and_flags_end_in_0_or_one_message_with_a_documented_code():
    codes, wrong = Counter(), []
    for seed, kind, words, given in fuzz.run(range(180)):
        codes[kind, bool(given.code)] += 1
        if given.wrong:
            wrong.append(f"seed {seed}, {kind}: {words}\n{given.wrong}\n{given.err}")
    assert not wrong, "\n".join(wrong)
    for kind in ("profile", "plan", "flags", "job"):  # not all refused, and not all let through
        assert codes[kind, False] >= 3
        assert codes[kind, True] >= 12


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (4, "megatron-autorecompute show: one\nmegatron-autorecompute show: two\n"),
        (4, ""),
        (77, "megatron-autorecompute show: one\n"),
        (1, 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n'),
    ],
)
def test_other_answers_are_found_wrong(code, err):
    assert fuzz.Answer(code, "", err, 0.1).wrong
    assert not fuzz.Answer(4, "", "megatron-autorecompute show: a\n  b: c\n", 0.1).wrong
