"""What `import megatron_autorecompute` gives, in whatever order its parts are imported."""

import inspect
import sys
from importlib import import_module

import pytest

pytest.importorskip("torch")
PACKAGE = "megatron_autorecompute"


@pytest.fixture
def fresh():
    """The package as if nothing of it had been imported. Afterwards all of it is as before: a part
    that only the test imported would have classes that are equal to none of the others."""
    before = taken_out()
    yield import_module(PACKAGE)
    taken_out()
    sys.modules.update(before)


def taken_out():
    """Remove the package's modules; returns them."""
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def test_every_public_name_is_there_and_listed(fresh):
    for name in fresh.__all__:
        assert getattr(fresh, name) is not None
    assert set(fresh.__all__) <= set(dir(fresh))
    assert f"{PACKAGE}.apply" in sys.modules  # loaded by name, the last of them
    with pytest.raises(AttributeError, match="has no attribute 'solver'"):
        fresh.solver  # noqa: B018


def refused(apply, fresh):
    """Whether it is `apply`: it refuses an object without layers."""
    policy = fresh.RecomputePolicy.parse("full", num_layers=1)
    with pytest.raises(import_module(f"{PACKAGE}.errors").AutorecomputeError):
        apply(policy, [])
    return True


def test_apply_by_the_package_first_and_then_from_its_module(fresh):
    assert refused(fresh.apply, fresh)
    assert refused(import_module(f"{PACKAGE}.apply").apply, fresh)
    assert refused(fresh.apply, fresh)


def test_apply_from_its_module_first_and_then_by_the_package(fresh):
    function = import_module(f"{PACKAGE}.apply").apply
    assert refused(function, fresh)
    assert refused(fresh.apply, fresh)
    assert list(inspect.signature(fresh.apply).parameters)[:2] == ["policy", "model"]


def test_submodules_that_the_readme_names_stay_modules(fresh):
    assert inspect.ismodule(import_module(f"{PACKAGE}.config"))
    assert fresh.config.install
    assert fresh.policy.RecomputePolicy is fresh.RecomputePolicy
