"""Parts of a layer that run once although a checkpoint around them reruns the layer.

Megatron's checkpoint runs a function twice: in forward without gradients, and again in backward. A
*part* is a function inside it, such as a linear layer. It runs in the first run alone, with its
autograd graph, cut off at its inputs. What that graph saved of its inputs is dropped. In the second
run the part does not run: its recomputed inputs fill what was dropped, its output is handed on, and
the part's own graph runs its backward.

An output that nothing in the second run reads is not kept: `full` reads no output of a layer's last
linear. What is handed on instead is NaN, so that a wrong claim cannot pass in silence. Whether an
output is read is learnt from the graph of the second run, again for every other shape of inputs,
every other set of trained parameters, and a layer that was changed. If it is read after all, the
part runs again as any other, at all shapes. Where code besides Megatron's may look at values
(`onlookers`), outputs are kept although nothing reads them. So all ranks that share collectives run
the same ones again, whatever their microbatches' lengths and onlookers.

This module knows no policy, and of Megatron its checkpoints alone. Layers' parts are in
`compat.layer_parts`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import Node, get_gradient_edge

from megatron_autorecompute.compat import checkpoints, pipeline_waits
from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.runtime.onlookers import Onlookers, onlookers_of
from megatron_autorecompute.runtime.saved import saved

Key = tuple[Any, ...]
"""What decides which outputs are read: the inputs' shapes, which parameters are trained, and how
often the layer was changed."""

_is_trained = operator.attrgetter("requires_grad")
_THROUGH = object()
"""Stands for an activation, which passes through a checkpoint and not beside it."""


Function = TypeVar("Function", bound=Callable[..., Any])


def _uncompiled(function: Function) -> Function:
    """A function that torch.compile does not trace, because which checkpoint runs changes from call
    to call. What it calls is compiled as it is elsewhere."""
    marked: Function = torch.compiler.disable(function, recursive=False)
    return marked


class _Running(threading.local):
    inside: _Checkpoint | None = None
    """The checkpoint whose function runs now in this thread; None: parts run as usual."""
    early: list[pipeline_waits.Begin] | None = None
    """Takes the second runs of the checkpoints made now, to begin them early; None: no such."""


_running = _Running()


class Part:
    """Stands in for a function of a model inside checkpoints: a module's forward, or a method.

    Args:
        owner: the module or object whose attribute is replaced, until `undo`.
        attribute: the function's name, such as `forward`.
        around: the module whose parameters decide, by being trained or frozen, what is read.
        inputs: how many of the first positional arguments are activations.
        keeps: keep the output if the second run reads it. Without, the part then runs again.
        draws: the function may draw random numbers.
        instead: called with the owner in the second run, for what the function does besides.
    """

    def __init__(
        self,
        owner: Any,
        attribute: str,
        around: torch.nn.Module,
        *,
        inputs: int = 1,
        keeps: bool = False,
        draws: bool = False,
        instead: Callable[[Any], None] | None = None,
    ) -> None:
        self.attribute, self.around = attribute, weakref.ref(around)
        self.inputs, self.keeps, self.draws, self.instead = inputs, keeps, draws, instead
        self.name = f"{type(owner).__name__}.{attribute}"
        self.before = vars(owner).get(attribute)
        self._owner = weakref.ref(owner)
        self.reads: dict[Key, tuple[bool, ...]] = {}
        """Whether the second run reads each output, by key."""
        self.reruns: dict[Key, bool] = {}
        """Whether it runs again because an output is read, by key without the inputs' shapes."""
        self._onlookers: Onlookers | None = None
        self._changes = 0
        checkpoints.wrap_while_alive(self, _Checkpoint)
        setattr(owner, attribute, self)

    @property
    def owner(self) -> Any:
        """The object whose attribute this is; None once it is freed."""
        return self._owner()

    def undo(self) -> None:
        """Put the function back."""
        put_back(self._owner(), self.attribute, self)

    @_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or in a second run what stands for it."""
        return self.route(self.function, args, kwargs)

    def route(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function`, as a call of this part."""
        checkpoint = _running.inside
        if checkpoint is None:
            return function(*args, **kwargs)
        return checkpoint.run(self, function, args, kwargs)

    @property
    def function(self) -> Any:
        """What this part stands in for, bound to its owner."""
        if self.before is not None:
            return self.before
        owner = self._owner()
        return getattr(type(owner), self.attribute).__get__(owner)

    def surroundings(self) -> tuple[Key, str | None]:
        """What decides which outputs are read, apart from shapes, and the code that looks at them
        besides."""
        layer = self.around()
        if layer is None:
            return (), None
        if self._onlookers is None or self._onlookers.are_of_another_layer():
            # Walks through modules take long.
            self._onlookers, self._changes = onlookers_of(layer, self.owner), self._changes + 1
        trained = tuple(map(_is_trained, self._onlookers.parameters))
        return (trained, self._changes), self._onlookers.first()

    def __getstate__(self) -> Any:
        strong = {"_owner": self._owner(), "around": self.around()}
        return {**vars(self), **strong, "reads": {}, "reruns": {}, "_onlookers": None}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._owner, self.around = weakref.ref(state["_owner"]), weakref.ref(state["around"])
        checkpoints.wrap_while_alive(self, _Checkpoint)


class ProductPart(Part):
    """The batched product (`torch.bmm`) in a module's forward: an unfused attention's last."""

    @_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, or in a second run the forward without the product."""
        if _running.inside is None:
            return self.function(*args, **kwargs)
        with _Products(self):
            return self.function(*args, **kwargs)


class _Products(torch.overrides.TorchFunctionMode):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.bmm:
            return self.part.route(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Scope:
    """Puts one of Megatron's checkpoints around a module's forward, until `undo`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.before = vars(module).get("forward")
        self._module = weakref.ref(module)
        checkpoints.wrap_while_alive(self, _Checkpoint)
        module.forward = self

    def undo(self) -> None:
        """Put the forward back."""
        put_back(self._module(), "forward", self)

    @_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, in training inside a checkpoint."""
        module: Any = self._module()
        forward = self.before or functools.partial(type(module).forward, module)
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        where = [i for i, each in enumerate(args) if _is_activation(each)]
        others = [None if _is_activation(each) else each for each in args]
        beside: list[Any] = []

        def function(*activations: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # What is no activation passes beside the checkpoint, whose backward would wait for a
            # gradient of it: a bias that is added later.
            given = list(others)
            for i, each in zip(where, activations, strict=True):
                given[i] = each
            outputs = forward(*given, **kwargs)
            flat = _flat(outputs)
            if _is_nested(flat):
                raise ApplyError(f"{type(module).__name__} returns nested outputs; use full there.")
            passed = [_THROUGH if _is_activation(each) else each for each in flat]
            beside[:] = [_like(outputs, passed)]
            return tuple(each for each in flat if _is_activation(each))

        through = iter(checkpoints.run(function, *(args[i] for i in where)))
        outputs = beside.pop()
        flat = [next(through) if each is _THROUGH else each for each in _flat(outputs)]
        return _like(outputs, flat)

    def __getstate__(self) -> Any:
        return {**vars(self), "_module": self._module()}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])
        checkpoints.wrap_while_alive(self, _Checkpoint)


class EarlyBegin:
    """Makes second runs of checkpoints made inside `begin_early` begin where Megatron's pipeline
    waits for their gradient, while an instance is alive."""

    def __init__(self) -> None:
        checkpoints.wrap_while_alive(self, _Checkpoint)
        pipeline_waits.watch_while_alive(self)

    def undo(self) -> None:
        """Nothing of a model was changed."""

    def __reduce__(self) -> Any:
        return EarlyBegin, ()


@contextlib.contextmanager
def begin_early() -> Iterator[None]:
    """The second runs of the checkpoints made inside begin early; see `EarlyBegin`."""
    before, _running.early = _running.early, pipeline_waits.early()
    try:
        yield
    finally:
        _running.early = before


def put_back(owner: Any, attribute: str, ours: Any) -> None:
    """Take ours out, unless somebody has put a function around it, which then runs it as usual."""
    if owner is None or vars(owner).get(attribute) is not ours:
        return
    if ours.before is None:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, ours.before)


class _Checkpoint:
    """The function of one checkpoint: the first run without gradients, the second with."""

    def __init__(self, function: Any) -> None:
        # Without gradients there is no second run: an evaluation, a checkpoint in a checkpoint.
        self.function, self.runs_twice = function, torch.is_grad_enabled()
        self.calls: list[_Call] = []
        self.left: list[_Call] | None = None
        """The calls that the second run has not come to."""
        self.keys: dict[Any, tuple[Key, str | None]] = {}
        self.early: _Early | None = None
        """The second run, if it has begun before the backward."""
        self.early_ones = _running.early if self.runs_twice else None
        """Gets the second run, to begin it early; None: it waits for the backward."""

    def __call__(self, *args: Any) -> Any:
        if not self.runs_twice:
            return _inside(None, self.function, *args)
        if torch.is_grad_enabled():
            early, self.early = self.early, None
            return self._again(args) if early is None else early.handed_on(args)
        self.shapes = tuple(
            [(tuple(a.shape), a.dtype) for a in args if isinstance(a, torch.Tensor)]
        )
        return _inside(self, self.function, *args)

    def note(self, outputs: Any) -> None:
        """Note, after the first run, that the second run may begin early."""
        assert self.early_ones is not None  # or nobody asks
        node = next(e.grad_fn for e in _flat(outputs) if getattr(e, "grad_fn", None))
        self.early_ones.append(functools.partial(_begin, weakref.ref(node)))

    def begin(self, inputs: Sequence[Any]) -> None:
        """Run again before the backward, which the outputs wait for."""
        early = _Early(inputs)
        early.keep(self._again(tuple(early.inputs or ())))
        self.early = early

    def run(self, part: Part, function: Any, args: Any, kwargs: Any) -> Any:
        """A part's function, in this checkpoint's first or second run."""
        if self.left is not None:
            for n, call in enumerate(self.left):
                if call.part is part:
                    return self.left.pop(n).again(function, args, kwargs)
            # A policy was put in force in between, or this is a third run.
            return function(*args, **kwargs)
        if len(args) < part.inputs:
            return function(*args, **kwargs)
        key, onlooker = self._key(part)
        call = _Call(part, key, is_watched=onlooker is not None)
        self.calls.append(call)
        # Checkpoints inside a part are ordinary ones.
        return _inside(None, call.once, function, args, kwargs)

    def _key(self, part: Part) -> tuple[Key, str | None]:
        if part.around not in self.keys:
            key, onlooker = part.surroundings()
            self.keys[part.around] = ((self.shapes, *key), onlooker)
            if onlooker:
                say_that_more_is_held(onlooker)
        return self.keys[part.around]

    def _again(self, args: tuple[Any, ...]) -> Any:
        for call in self.calls:  # another microbatch may have shown it after this one's first run
            call.runs_again = call.runs_again or call.part.reruns.get(call.key[1:], False)
        known = all([call.is_known() for call in self.calls])
        take_back = None if known else self._effects()
        outputs = self._run_again(args)
        if take_back is not None and _learn(outputs, self.calls):
            take_back()
            outputs = self._run_again(args)
        for call in self.calls:
            call.let_go()
        self.calls = []
        return outputs

    def _effects(self) -> Callable[[], None]:
        """What takes back the effects of a second run: numbers drawn, and what routers count in
        buffers and log."""
        states, logged = checkpoints.generator_states(), checkpoints.logged_losses()
        around = [call.part.around() for call in self.calls]
        buffers = {id(b): b for layer in around if layer is not None for b in layer.buffers()}
        before = [(each, each.clone()) for each in buffers.values()]
        losses = {name: each.clone() for name, each in logged.items()}

        def take_back() -> None:
            checkpoints.set_generator_states(states)
            for counter, value in before:
                counter.copy_(value)
            for name, each in checkpoints.logged_losses().items():
                each.copy_(losses.get(name, torch.zeros_like(each)))

        return take_back

    def _run_again(self, args: tuple[Any, ...]) -> Any:
        self.left = list(self.calls)
        for call in self.calls:
            call.node = None
        return _inside(self, self.function, *args)


def _begin(reference: weakref.ref[Any]) -> None:
    node = reference()
    if node is not None:  # its graph is there
        with checkpoints.second_run(node) as (checkpoint, inputs):
            checkpoint.begin(inputs)


@functools.cache
def say_that_more_is_held(onlooker: str) -> None:
    """Warn, once for each onlooker, that outputs are kept for it."""
    warnings.warn(
        f"Recomputed layers keep results that no backward reads, because {onlooker} may look at "
        "their values. No bit of the training changes; layers hold more bytes than planned. Take "
        "it off, or recompute as Megatron does: megatron:POLICY.",
        UserWarning,
        stacklevel=2,
    )


def _inside(checkpoint: _Checkpoint | None, function: Any, *args: Any) -> Any:
    """`function(*args)`, whose parts are run by a checkpoint, or as usual."""
    before, _running.inside = _running.inside, checkpoint
    try:
        return function(*args)
    finally:
        _running.inside = before


class _Slot(NamedTuple):
    """A saved tensor that is a view of an input."""

    number: int
    """Of the input."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _geometry(each: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(each.size()), each.stride(), int(each.storage_offset())


class _Dead(NamedTuple):
    """An output that nothing in the second run reads."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, each: torch.Tensor) -> _Dead:
        return cls(each.size(), each.dtype, each.device)

    def nan(self) -> torch.Tensor:
        return torch.full(self.size, float("nan"), dtype=self.dtype, device=self.device)


class _Unseen(_Dead):
    """An output of which only the shape is seen."""

    def nan(self) -> torch.Tensor:
        return torch.full((), float("nan"), dtype=self.dtype, device=self.device).expand(self.size)


class _Apart:
    """A graph that is cut off at its inputs, until its backward."""

    inputs: Sequence[torch.Tensor] | None
    gradients: list[Any]  # of the inputs; the graph refers to this list, not to self
    edges: list[Any]
    kept: list[Any]
    """What stands for the outputs where the graph is put into another one."""

    def cut(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The inputs that the graph begins with; gradients are enabled."""
        self.count, self.gradients, self.edges, self.kept = len(inputs), [], [], []
        found: tuple[torch.Tensor, ...] = _Entry.apply(self.gradients, _token(), *inputs)
        return found

    def run_backward(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the inputs, from those of the outputs."""
        arrived = [(e, g) for e, g in zip(self.edges, gradients, strict=True) if g is not None]
        self.edges = []
        if arrived:
            torch.autograd.backward([e for e, _ in arrived], [g for _, g in arrived])
        found = list(self.gradients) or [None] * self.count
        self.gradients.clear()
        self.inputs = None
        return found


class _Early(_Apart):
    """A checkpoint's second run that began before the backward."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.where = [i for i, e in enumerate(inputs) if getattr(e, "requires_grad", False)]
        given = [e.detach() if isinstance(e, torch.Tensor) else e for e in inputs]
        for i, each in zip(self.where, self.cut([given[i] for i in self.where]), strict=True):
            given[i] = each
        self.inputs = tuple(given)

    def keep(self, outputs: Any) -> None:
        """Keep the graph of the outputs that have one, and outputs without one."""
        flat = _flat(outputs)
        self.live = [i for i, each in enumerate(flat) if getattr(each, "requires_grad", False)]
        self.edges = [get_gradient_edge(flat[i]) for i in self.live]
        self.kept = [_Unseen.like(flat[i]) for i in self.live]
        for i in self.live:
            flat[i] = None
        self.outputs, self.inputs = _like(outputs, flat), ()

    def handed_on(self, inputs: Sequence[Any]) -> Any:
        """What stands for the outputs in the backward, whose inputs these are."""
        made = _Reattach.apply(self, _token(), *[inputs[i] for i in self.where])
        flat = _flat(self.outputs)
        for i, each in zip(self.live, made, strict=True):
            flat[i] = each
        return _like(self.outputs, flat)


class _Call(_Apart):
    """One call of a part, from its forward to its backward."""

    def __init__(self, part: Part, key: Key, *, is_watched: bool = False) -> None:
        self.part, self.key, self.is_watched = part, key, is_watched
        self.runs_again = False
        """The second run runs it as any other function."""
        self.inputs: list[torch.Tensor] | None = None  # of the second run
        self.node: Node | None = None  # that stands for this call in the second run's graph
        self.states: Any = None  # of the generators afterwards, if the part drew numbers
        self.wanted: set[int] = set()
        """Numbers of the inputs of which something was dropped."""

    def is_known(self) -> bool:
        """Whether it is known which outputs the second run reads."""
        return self.runs_again or self.key in self.part.reads

    # -------------------------------------------------------------------------------- first run

    def once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.part.reruns.get(self.key[1:], False) or _others_take_what_is_saved():
            self.runs_again = True
            return function(*args, **kwargs)
        reads = self.part.reads.get(self.key)
        before = checkpoints.generator_states() if self.part.draws else None
        count = self.part.inputs
        versions = [each._version for each in args[:count]]
        with torch.enable_grad():
            inputs = self.cut([each.detach() for each in args[:count]])
            outputs = function(*inputs, *args[count:], **kwargs)
        if self.part.draws:
            after = checkpoints.generator_states()
            self.states = None if checkpoints.same_states(before, after) else after
        changed = versions != [each._version for each in inputs]
        return self._cut(inputs, changed, outputs, reads)

    def _cut(self, inputs: Sequence[torch.Tensor], changed: bool, outputs: Any, reads: Any) -> Any:
        flat = _flat(outputs)
        self.live = [i for i, e in enumerate(flat) if _is_activation(e) and e.requires_grad]
        self.edges = [get_gradient_edge(flat[i]) for i in self.live]
        # A part that changes its inputs must change them in the second run too.
        if changed or not self.live or _is_nested(flat) or not self._drop(inputs):
            self.runs_again, self.edges = True, []
            return _like(outputs, [e.detach() if _is_activation(e) else e for e in flat])
        self.geometry = [_geometry(each) for each in inputs]
        made = [flat[i].detach() for i in self.live]
        keeps = self.part.keeps
        everything = self.is_watched or (keeps and reads is None)
        self.kept = [
            each if everything or (keeps and reads[n]) else _Dead.like(each)
            for n, each in enumerate(made)
        ]
        self.versions = self._versions()
        for i in self.live:
            flat[i] = None
        self.outputs = _like(outputs, flat)
        return self._outputs(made)

    def _outputs(self, activations: Sequence[torch.Tensor]) -> Any:
        flat = _flat(self.outputs)
        for i, each in zip(self.live, activations, strict=True):
            flat[i] = each
        return _like(self.outputs, flat)

    def _drop(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Drop what the graph saved of its inputs.

        Returns:
            False where somebody else's hooks are on what is saved, which can have no others.
        """
        storages = {each.untyped_storage()._cdata: n for n, each in enumerate(inputs)}
        nodes = [edge.node for edge in self.edges]
        seen: set[Node | None] = {None, inputs[0].grad_fn}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
            for handle, value in saved(node):
                number = storages.get(value.untyped_storage()._cdata)
                if number is not None and value.dtype == inputs[number].dtype:
                    slot = _Slot(number, value.size(), value.stride(), int(value.storage_offset()))
                    fill = functools.partial(_fill, weakref.ref(self))
                    try:
                        handle.register_hooks(functools.partial(_put, slot), fill)
                    except RuntimeError:
                        return False
                    self.wanted.add(number)
        return True

    # ------------------------------------------------------------------------------- second run

    def again(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.runs_again or self.versions != self._versions():
            return function(*args, **kwargs)  # an output changed in place is no longer the part's
        if self.part.instead is not None:
            self.part.instead(self.part.owner)
        if self.states is not None:
            checkpoints.set_generator_states(self.states)
        inputs = args[: self.part.inputs]
        self.inputs = [each.detach() for each in inputs]
        self.versions = [each._version for each in inputs]
        outputs = _Reattach.apply(self, _token(), *inputs)
        self.node = outputs[0].grad_fn
        return self._outputs(outputs)

    def _versions(self) -> list[int]:
        return [each._version for each in self.kept if isinstance(each, torch.Tensor)]

    def settle(self) -> None:
        """Decide, once it is known what is read, whether the part runs again.

        Raises:
            ApplyError: at another shape it did not, so other ranks may be without its collectives.
        """
        part = self.part
        self.runs_again = not part.keeps and any(part.reads[self.key])
        before = part.reruns.setdefault(self.key[1:], self.runs_again)
        if self.runs_again and not before:
            if checkpoints.has_other_ranks():
                raise ApplyError(
                    f"The output of {part.name} is read with inputs of {self.key[0]}, and was not "
                    "with others. Recompute the layer as Megatron does: +all."
                )
            part.reruns[self.key[1:]] = True

    def let_go(self) -> None:
        """Drop what the graph has, after the second run."""
        self.kept, self.node = [], None

    def fill(self, slot: _Slot) -> torch.Tensor:
        """What was dropped, as a view of the recomputed input."""
        if self.inputs is None:
            raise ApplyError(
                f"The backward of {self.part.name} ran without its recompute, or twice."
            )
        again, was = self.inputs[slot.number], self.geometry[slot.number]
        if again._version != self.versions[slot.number]:
            raise ApplyError(
                f"An input of {self.part.name} was changed in place after it. Recompute the layer "
                "as Megatron does: +all."
            )
        size, stride, offset = _geometry(again)
        if (size, stride) != was[:2]:
            raise ApplyError(
                f"{self.part.name} was recomputed with an input of {size}, strides {stride}; in "
                f"forward it had {was[0]}, strides {was[1]}. "
                "Recompute the layer as Megatron does: +all."
            )
        return again.as_strided(slot.size, slot.stride, slot.offset - was[2] + offset)


class _Entry(torch.autograd.Function):
    """A part's inputs, cut off from what made them; receives their gradients."""

    @staticmethod
    def forward(ctx: Any, found: list[Any], _: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple([each.detach() for each in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.found[:] = gradients
        return (None, None, *[None] * len(gradients))


class _Reattach(torch.autograd.Function):
    """Stands for the outputs of a separate graph: a part's in the second run, or a second run's in
    the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Apart, _: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple([e.nan() if isinstance(e, _Dead) else e.detach() for e in call.kept])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call, ctx.call = ctx.call, None
        found = call.run_backward(gradients)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *[g if w else None for g, w in zip(found, wanted, strict=True)])


def _others_take_what_is_saved() -> bool:
    """Whether hooks of `torch.autograd.graph.saved_tensors_hooks` are in force, which may save
    copies: what a graph saved of its inputs cannot be seen then."""
    if top_hooks is not None:
        return top_hooks(True) is not None
    with torch.enable_grad():
        node: Any = _token().exp().grad_fn
    try:
        node._raw_saved_result.register_hooks(_itself, _itself)
    except RuntimeError:  # has hooks
        return True
    return False


top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # since 2.8


def _itself(each: Any) -> Any:
    return each


def _put(slot: _Slot, _: torch.Tensor) -> _Slot:
    return slot


def _fill(call: weakref.ref[_Call], slot: _Slot) -> torch.Tensor:
    found = call()
    assert found is not None  # the graph that asks is the call's
    return found.fill(slot)


@functools.cache
def _token() -> torch.Tensor:
    return torch.zeros(0, requires_grad=True)


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _like(outputs: Any, flat: Sequence[Any]) -> Any:
    """The inverse of `_flat`, with what may be another content."""
    return tuple(flat) if isinstance(outputs, (tuple, list)) else flat[0]


def _is_nested(flat: Sequence[Any]) -> bool:
    return any([isinstance(each, (tuple, list, dict)) for each in flat])


def _is_activation(each: Any) -> bool:
    return (
        isinstance(each, torch.Tensor)
        and not isinstance(each, torch.nn.Parameter)
        and each.is_floating_point()
    )


def _learn(outputs: Any, calls: Sequence[_Call]) -> bool:
    """Learn from the graph of a second run which outputs of parts it reads.

    Returns:
        Whether a part's output is read that was not kept; that part is to run again.
    """
    parts = {call.node: call for call in calls if call.node is not None}
    read = _outputs_read(outputs, parts)
    for node, call in parts.items():
        _note(call, node, read)
    for call in parts.values():
        call.settle()
    return any([call.runs_again for call in parts.values()])


def _outputs_read(outputs: Any, parts: dict[Node, _Call]) -> set[tuple[Node, int]]:
    """The outputs of parts on which a saved tensor depends, or an input that another part wants."""
    depends: dict[Node, set[tuple[Node, int]]] = {}
    read: set[tuple[Node, int]] = set()

    def leads_to(node: Node) -> Iterator[tuple[int, set[tuple[Node, int]]]]:
        for place, (after, n) in enumerate(node.next_functions):
            if after is not None:
                yield place, {(after, n)} if after in parts else depends.get(after, set())

    for node in _in_order(outputs):
        if node in parts:  # what leaves a part are outputs of its own; the first input is a token
            wanted = parts[node].wanted
            read.update(*(of for place, of in leads_to(node) if place - 1 in wanted))
            continue
        of = set().union(*(of for _, of in leads_to(node)))
        if of:
            depends[node] = of
            if _reads(node):
                read |= of
    for node, call in reversed(parts.items()):  # a part that runs again reads all its inputs
        if not call.part.keeps and any(of == node for of, _ in read):
            read.update(*(of for _, of in leads_to(node)))
    return read


def _reads(node: Any) -> bool:
    """Whether a node saved a tensor, also as an attribute of its context. The mask of dropout does
    not count: it depends on shapes alone."""
    if type(node).__name__ == "CppFunction":  # of a torch.jit function: shows nothing
        return True
    attributes = getattr(node, "__dict__", {}).values()
    found = [each for value in attributes for each in _flat(value)]
    found += [value for _, value in saved(node)]
    tensors = [each for each in found if isinstance(each, torch.Tensor)]
    masks = (torch.bool, torch.uint8) if "Dropout" in type(node).__name__ else ()
    return any(each.dtype not in masks for each in tensors)


def _note(call: _Call, node: Node, read: set[tuple[Node, int]]) -> None:
    # A part may be called several times in a checkpoint, and one of its outputs be read.
    found = [(node, n) in read for n in range(len(call.live))]
    before = call.part.reads.get(call.key, found)
    reads = tuple(map(any, zip(found, before, strict=True)))
    call.part.reads[call.key] = reads


def _in_order(outputs: Any) -> Iterator[Node]:
    """The nodes of a graph, each after all that it leads to."""
    found = (each.grad_fn for each in _flat(outputs) if isinstance(each, torch.Tensor))
    stack = [(node, False) for node in found if node is not None]
    seen: set[Node] = set()
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
