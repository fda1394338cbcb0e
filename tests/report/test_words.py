import pytest

from megatron_autorecompute.report.words import duration, size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(73 * 2**30 + 2**27, "73.12 GiB"), (34 * 2**20, "34.0 MiB"), (0, "0.0 MiB")],
)
def test_bytes_are_written_in_the_unit_that_fits(size_bytes, text):
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0.25, "0.25 ms"),
        (86.153, "86.2 ms"),
        (525.4, "525 ms"),
        (4041, "4.04 s"),
        (26581, "26.6 s"),
    ],
)
def test_times_have_three_figures(time_ms, text):
    assert duration(time_ms) == text
