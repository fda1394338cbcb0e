"""torch's memory history is read as torch counts it, and nothing else is read at all."""

import os
import pickle

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.report.recorded import read_history
from tests.report.snapshots import ATTENTION, ELSEWHERE, Recorder, dumped


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0.pickle"


def three_tensors(device=0):
    """One that stays, one that comes and goes, one that is there before and freed."""
    recorder = Recorder(device)
    before = recorder.alloc(4096)
    recorder.alloc(1 << 20, ELSEWHERE)
    recorder.forget(2)
    recorder.alloc(2048, ATTENTION)
    recorder.briefly(1024, ATTENTION)
    recorder.free(before)
    return recorder


def test_bytes_before_the_first_event_follow_from_the_blocks_at_the_end(path):
    recorder = three_tensors()
    history = read_history(dumped(recorder.snapshot(), path))
    before = 4096 + (1 << 20)
    changes = [2048, 1024, -1024, -4096]
    assert history.level_bytes.tolist() == [before + sum(changes[:n]) for n in (1, 2, 3, 4)]


def test_the_stack_of_an_allocation_says_what_it_belongs_to(path):
    history = read_history(dumped(three_tensors().snapshot(), path))
    assert history.kinds == ("forward", "forward", "", "")


def test_sizes_are_rounded_as_torchs_allocator_rounds_them(path):
    recorder = Recorder()
    recorder.alloc(1)
    recorder.alloc(513)
    assert read_history(dumped(recorder.snapshot(), path)).level_bytes.tolist() == [512, 1536]


def test_a_history_of_another_device_of_the_machine_is_found(path):
    history = read_history(dumped(three_tensors(device=3).snapshot(), path))
    assert len(history.time_us) == 4


def test_a_tensor_that_another_stream_still_uses_is_freed_when_it_is_given_back(path):
    recorder = Recorder()
    late = recorder.alloc(512)
    recorder.free(late)
    del recorder.trace[-1]  # free_completed has not come yet
    assert read_history(dumped(recorder.snapshot(), path)).level_bytes.tolist() == [512, 0]


def test_other_events_are_passed_over(path):
    snapshot = three_tensors().snapshot()
    for action in ("segment_alloc", "segment_free", "snapshot", "oom", "of a later torch"):
        snapshot["device_traces"][0].insert(1, {"action": action, "size": 1 << 40})
    assert len(read_history(dumped(snapshot, path)).time_us) == 4


def refusal(path):
    with pytest.raises(ProfileError) as caught:
        read_history(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("/tmp/should-never-be-made-by-a-snapshot",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(path):
    snapshot = three_tensors().snapshot() | {"more": _Runs()}
    path.write_bytes(pickle.dumps(snapshot))
    assert "asks for posix.mkdir" in refusal(path)
    assert not os.path.exists("/tmp/should-never-be-made-by-a-snapshot")


@pytest.mark.parametrize("name", ["eval", "getattr", "bytearray", "print"])
def test_python_builtins_that_can_be_called_are_refused_too(path, name):
    path.write_bytes(f"cbuiltins\n{name}\n.".encode())
    assert f"asks for builtins.{name}" in refusal(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no whole snapshot"),
        (b"PK\x03\x04 what torch.save writes", "no whole snapshot"),
        (b'{"json": 1}', "no whole snapshot"),
        (pickle.dumps(three_tensors().snapshot())[:-400], "no whole snapshot"),
        (pickle.dumps([1, 2]), "list indices must be integers"),
        (pickle.dumps({"device_traces": {"0": []}}), "it lacks 0"),
        (pickle.dumps({"device_traces": []}), "no whole snapshot"),
        (pickle.dumps(Recorder().snapshot()), "_record_memory_history() before the step"),
        (pickle.dumps({"device_traces": [[{"action": "snapshot"}]]}), "has no allocation"),
        (pickle.dumps({"device_traces": [[17]]}), "'int' object is not subscriptable"),
        (
            pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1}]]}),
            "it lacks 'time_us'",
        ),
        (
            pickle.dumps({"device_traces": [[{"action": "alloc"}]], "segments": [{"device": 0}]}),
            "it lacks 'blocks'",
        ),
    ],
)
def test_what_is_no_whole_snapshot_is_refused_in_one_line(path, content, why):
    path.write_bytes(content)
    assert why in refusal(path)


def test_a_history_without_frees_is_refused(path):
    entry = {"action": "alloc", "addr": 4096, "size": 512, "time_us": 1}
    assert "has no frees" in refusal(dumped({"device_traces": [[entry, entry]]}, path))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.pickle")
    assert "cannot be read" in refusal(tmp_path)
