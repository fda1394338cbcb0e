"""The plan file: what is written when, and that its folder's troubles end no job."""

import shutil
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.runtime.plan_store import PlanStore
from tests.planner.random_profiles import problem_of_many

pytestmark = pytest.mark.any_version
JOB = {"hidden_size": "64", "world_size": "8"}


@pytest.fixture(scope="module")
def plan():
    profile, layout, schedule, budget = problem_of_many()
    return make_plan(Problem(replace(profile, fingerprint=JOB), layout, schedule).at(budget))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "save").mkdir()
    return tmp_path / "save"


def test_a_plan_of_the_same_job_is_known_and_of_another_one_is_told_apart(folder, plan):
    path, said = str(folder / "plan.json"), []
    PlanStore(path, JOB, said.append).save(plan)
    assert PlanStore(path, JOB, said.append).known() == plan
    assert said == []
    assert PlanStore(path, {"hidden_size": "64", "cp": "2"}, said.append).known() is None
    assert "Changed: cp: absent, now 2; world_size: 8, now absent" in said[0]


DAMAGED = {
    "empty": b"",
    "cut off": b'{"schema_version": 1, "profile": {"fingerprint": {"hidden_size": "64"',
    "zeros": bytes(4096),
    "no text": bytes(range(128, 256)),
    "of an older version": b'{"schema_version": 0, "cost": {}}',
    "of a newer version": b'{"schema_version": 99}',
    "something else": b"seed: 1234\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_without_a_plan_is_kept_aside_and_said_and_a_plan_takes_its_place(
    folder, plan, name
):
    path, said = folder / "plan.json", []
    path.write_bytes(DAMAGED[name])
    store = PlanStore(str(path), JOB, said.append)
    assert store.known() is None
    assert not path.exists()
    aside = path.with_name("plan.json.unreadable")
    assert aside.read_bytes() == DAMAGED[name]
    assert said[0].startswith(f"recompute auto: {path} holds no plan, is {aside} now, ")
    store.save(plan)
    assert PlanStore(str(path), JOB, pytest.fail).known() == plan


def test_a_damaged_plan_behind_a_link_leaves_the_link(folder, plan, tmp_path):
    shared, link = tmp_path / "shared.json", folder / "plan.json"
    shared.write_text("")
    link.symlink_to(shared)
    store = PlanStore(str(link), JOB, lambda text: None)
    assert store.known() is None
    store.save(plan)
    assert link.is_symlink()
    assert Plan.load(shared) == plan


def test_a_plan_that_may_not_be_opened_stays_where_it_is_and_is_an_error(folder, plan, monkeypatch):
    path = folder / "plan.json"
    store = PlanStore(str(path), JOB, pytest.fail)
    store.save(plan)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(ProfileError, match="Permission denied"):
        store.known()
    monkeypatch.undo()
    assert Plan.load(path) == plan


def test_without_a_path_nothing_is_kept(plan):
    store = PlanStore(None, JOB, pytest.fail)
    store.save(plan)
    assert store.known() is None
    assert not store.leave(plan)
    assert store.close() is None


def test_a_folder_that_is_not_there_at_the_start_is_an_error(tmp_path):
    with pytest.raises(ProfileError, match=r"Cannot write .*No such file"):
        PlanStore(str(tmp_path / "nowhere" / "plan.json"), JOB, pytest.fail)


@pytest.mark.parametrize("becomes", ["nothing", "a file"])
def test_a_folder_that_goes_during_training_is_said_and_written_when_it_is_back(
    folder, plan, becomes
):
    said = []
    store = PlanStore(str(folder / "plan.json"), JOB, said.append)
    shutil.rmtree(folder)
    if becomes == "a file":
        folder.write_text("")
    store.save(plan)
    assert len(said) == 1
    assert "Cannot write" in said[0]
    assert "Training goes on" in said[0]
    if becomes == "a file":
        folder.unlink()
    folder.mkdir()
    store.save(plan)
    assert Plan.load(folder / "plan.json") == plan
    assert len(said) == 1


def test_the_last_try_is_at_the_end_of_the_job(folder, plan):
    said = []
    store = PlanStore(str(folder / "plan.json"), JOB, said.append)
    shutil.rmtree(folder)
    store.save(plan)
    assert not store.leave(plan)
    path = folder / "plan.json"
    assert store.close() == f"not saved: {path} could not be written"
    folder.mkdir()
    assert store.close() == f"saved in {path}"
    assert Plan.load(folder / "plan.json") == plan
