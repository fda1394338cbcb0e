"""Empty stand-ins for what Megatron Bridge imports and no CPU machine can have; for tests only.

Bridge 0.3.1 imports `transformer_engine` in peft/lora_layers.py and `megatron.energon` for its
multimodal data without asking whether they are there; 0.6 and later import a newer
`nvidia_resiliency_ext` than Python 3.11 can have. Only names are imported; whatever would use one
fails. Put in place after megatron.core and modelopt, so that both know that they have no TE.
"""

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings

PACKAGES = ("transformer_engine", "megatron.energon", "nvidia_resiliency_ext")


class _AnyName(abc.ABCMeta):
    """A class in which every name is again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})

    def __getitem__(cls, parameters):
        return cls

    def __call__(cls, *args, **kwargs):
        # A decorator from a stand-in leaves what it decorates; a base class makes its instances.
        if cls.__bases__ == (object,) and args and callable(args[0]):
            return args[0]
        return super().__call__(*args, **kwargs) if cls.__bases__ != (object,) else cls


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        return _AnyName(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `packages`; asked only after all real finders found nothing."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0.0"  # older than anything that is asked for


def install() -> None:
    """Let the packages that are missing be found as stand-ins from now on."""
    with warnings.catch_warnings():  # both say what they miss
        warnings.simplefilter("ignore")
        for name in ("megatron.core.extensions.transformer_engine", "modelopt.torch.opt.plugins"):
            importlib.import_module(name)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
