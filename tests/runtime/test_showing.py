"""TensorBoard and W&B get the plan's policy and costs; a job never ends for want of them."""

import logging
import types

import pytest

from megatron_autorecompute.report.cost_table import COSTS, cost_rows, costs_markdown
from megatron_autorecompute.report.strip import strip_svg
from megatron_autorecompute.report.terminal import strip
from megatron_autorecompute.runtime.reporting import show
from tests.report.plans import THREE, example_plan

NAMES = ["recompute/policy", "recompute/costs"]


@pytest.fixture(scope="module")
def plan():
    return example_plan(*THREE["moe-16b"])


class Board:
    """TensorBoard's writer, as far as it is used."""

    def __init__(self):
        self.texts = {}

    def add_scalar(self, *_):
        raise AssertionError("figures are written elsewhere")

    def add_text(self, name, text, step):
        self.texts[name] = text, step


class Html:
    def __init__(self, text):
        self.text = text


class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data


def wandb():
    """The module, which is what Megatron passes on."""
    logged = []
    module = types.SimpleNamespace(Html=Html, Table=Table, logged=logged)
    module.log = lambda values, step: logged.append((values, step))
    return module


def test_tensorboard_gets_the_policy_and_a_table(plan):
    board = Board()
    show(plan, [board], 17)
    assert list(board.texts) == NAMES
    policy, step = board.texts[NAMES[0]]
    for chunks in plan.layout.stages:
        assert strip(plan.policy, chunks) in policy
    assert step == 17
    assert board.texts[NAMES[1]] == (costs_markdown(plan), 17)


def test_wandb_gets_them_in_its_own_classes(plan):
    module = wandb()
    show(plan, [module], 17)
    [(shown, step)] = module.logged
    assert step == 17
    assert list(shown) == NAMES
    assert shown[NAMES[0]].text == strip_svg(plan)
    table = shown[NAMES[1]]
    assert (table.columns, table.data) == (list(COSTS), cost_rows(plan))


def test_a_run_of_wandb_uses_the_module_that_it_is_of(plan, monkeypatch):
    module = wandb()
    run = types.new_class("Run")
    run.__module__ = "wandb_for_tests.sdk.wandb_run"
    run.log = lambda self, values, step: module.log(values, step)
    monkeypatch.setitem(__import__("sys").modules, "wandb_for_tests", module)
    show(plan, [run()], 3)
    assert [list(values) for values, _ in module.logged] == [NAMES]


def test_a_writer_that_refuses_everything_ends_nothing_and_the_next_gets_its_own(plan, caplog):
    class Closed:
        def log(self, *_):
            raise RuntimeError("the run has ended")

    board = Board()
    with caplog.at_level(logging.WARNING):
        show(plan, [Closed(), board], 1)
    [record] = caplog.records
    assert "Closed gets no table" in record.getMessage()
    assert list(board.texts) == NAMES


def test_tensorboards_own_writer_takes_them(plan, tmp_path, caplog):
    tensorboard = pytest.importorskip(
        "torch.utils.tensorboard", reason="tensorboard is not installed"
    )
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        show(plan, [writer], 5)
    assert not caplog.records
