"""TensorBoard and W&B get the plan's pictures and table; a job never ends for want of one."""

import logging
import types

import numpy as np
import pytest

from megatron_autorecompute.report import job_pictures
from megatron_autorecompute.report.job_pictures import COSTS, cost_rows, costs_markdown
from megatron_autorecompute.runtime.reporting import show
from tests.report.plans import THREE, example_plan

NAMES = ["recompute/policy", "recompute/memory", "recompute/costs"]


@pytest.fixture(scope="module")
def plan():
    return example_plan(*THREE["moe-16b"])


class Board:
    """TensorBoard's writer, as far as it is used."""

    def __init__(self):
        self.images, self.texts = {}, {}

    def add_scalar(self, *_):
        raise AssertionError("figures are written elsewhere")

    def add_image(self, name, image, step, *, dataformats):
        self.images[name] = image, step, dataformats

    def add_text(self, name, text, step):
        self.texts[name] = text, step


class Image:
    def __init__(self, pixels):
        self.pixels = pixels


class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data


def wandb():
    """The module, which is what Megatron passes on."""
    logged = []
    module = types.SimpleNamespace(Image=Image, Table=Table, logged=logged)
    module.log = lambda values, step: logged.append((values, step))
    return module


def test_tensorboard_gets_two_images_and_a_table(plan):
    board = Board()
    show(plan, None, [board], 17)
    assert list(board.images) == NAMES[:2]
    for image, step, dataformats in board.images.values():
        assert (image.dtype, image.ndim, step, dataformats) == (np.uint8, 3, 17, "HWC")
    assert board.texts == {NAMES[2]: (costs_markdown(plan), 17)}


def test_wandb_gets_them_in_its_own_classes(plan):
    module = wandb()
    show(plan, [cost.peak.bytes for cost in plan.cost.stages], [module], 17)
    shown = {name: (part, step) for values, step in module.logged for name, part in values.items()}
    assert list(shown) == NAMES
    assert all(step == 17 for _, step in shown.values())
    assert isinstance(shown[NAMES[0]][0], Image)
    table = shown[NAMES[2]][0]
    assert (table.columns, table.data) == (list(COSTS), cost_rows(plan))


def test_a_run_of_wandb_uses_the_module_that_it_is_of(plan, monkeypatch):
    module = wandb()
    run = types.new_class("Run")
    run.__module__ = "wandb_for_tests.sdk.wandb_run"
    run.log = lambda self, values, step: module.log(values, step)
    monkeypatch.setitem(__import__("sys").modules, "wandb_for_tests", module)
    show(plan, None, [run()], 3)
    assert [name for values, _ in module.logged for name in values] == NAMES


def test_every_writer_gets_its_own(plan):
    board, module = Board(), wandb()
    show(plan, None, [board, module], 1)
    assert len(board.images) + len(board.texts) == len(module.logged) == 3


def test_a_picture_that_cannot_be_made_is_a_warning_and_the_rest_is_written(
    plan, monkeypatch, caplog
):
    def fails(_):
        raise MemoryError("no room for a picture")

    monkeypatch.setattr(job_pictures, "policy_image", fails)
    board = Board()
    with caplog.at_level(logging.WARNING):
        show(plan, None, [board], 1)
    assert list(board.images) == [NAMES[1]]
    assert list(board.texts) == [NAMES[2]]
    [record] = caplog.records
    assert "TensorBoard gets no recompute/policy: MemoryError" in record.getMessage()


def test_a_writer_that_refuses_everything_ends_nothing(plan, caplog):
    class Closed:
        def log(self, *_):
            raise RuntimeError("the run has ended")

    show(plan, None, [Closed()], 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "Weights & Biases gets no recompute/costs" in caplog.text


def test_a_picture_is_drawn_once_for_all_writers_and_never_without_one(plan, monkeypatch):
    drawn = []
    monkeypatch.setattr(job_pictures, "policy_image", drawn.append)
    show(plan, None, [], 1)
    assert not drawn
    show(plan, None, [Board(), Board()], 1)
    assert drawn == [plan]


def test_tensorboards_own_writer_takes_them(plan, tmp_path, caplog):
    tensorboard = pytest.importorskip(
        "torch.utils.tensorboard", reason="tensorboard is not installed"
    )
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        show(plan, None, [writer], 5)
    assert not caplog.records
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["images"]) == set(NAMES[:2])
    assert events.Images(NAMES[0])[0].step == 5
