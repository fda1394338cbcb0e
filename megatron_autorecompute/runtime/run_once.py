"""Parts of a layer that run once although a checkpoint around them reruns the layer.

Megatron's checkpoint runs a function twice: in forward without gradients, and again in backward. A
*part* is a function inside it, such as a linear layer. It runs in the first run alone, with its
autograd graph, cut off at its inputs. What that graph saved of its inputs is dropped. In the second
run the part does not run: its recomputed inputs fill what was dropped, its output is handed on, and
the part's own graph runs its backward.

An output that nothing in the second run reads is not kept: `full` reads no output of a layer's last
linear. What is handed on instead is NaN, so that a wrong claim cannot pass in silence. Whether an
output is read is learnt from the graph of the second run, again for every other shape of inputs and
every other set of trained parameters. If it is read after all, the part runs again as any other.

This module knows no policy, and of Megatron its checkpoints alone. Layers' parts are in
`compat.layer_parts`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_autorecompute.compat import checkpoints
from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.runtime.live_bytes import never_count

Key = tuple[Any, ...]
"""What decides which outputs are read: the inputs' shapes, and which parameters are trained."""

_THROUGH = object()
"""In the place of an activation, which passes through a checkpoint and not beside it."""
_running: list[_Checkpoint | None] = []
"""The checkpoints whose function runs now, the innermost last; None: its parts run as usual."""


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
        """By key, of every output whether the second run reads it."""
        checkpoints.wrap_while_alive(self, _Checkpoint)
        setattr(owner, attribute, self)

    @property
    def owner(self) -> Any:
        """The object whose attribute this is; None once it is freed."""
        return self._owner()

    def undo(self) -> None:
        """Put the function back."""
        owner = self._owner()
        if owner is None:
            return
        if self.before is None:
            delattr(owner, self.attribute)
        else:
            setattr(owner, self.attribute, self.before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or in a second run what stands for it."""
        return self.route(self.function, args, kwargs)

    def route(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As a call, of `function`."""
        checkpoint = _running[-1] if _running else None
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

    def trained(self) -> tuple[bool, ...]:
        """Of every parameter of the module around, whether it is trained."""
        around = self.around()
        return () if around is None else tuple(p.requires_grad for p in around.parameters())

    def __getstate__(self) -> Any:
        strong = (self._owner(), self.around())
        return {**vars(self), "_owner": strong[0], "around": strong[1], "reads": {}}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._owner, self.around = weakref.ref(state["_owner"]), weakref.ref(state["around"])
        checkpoints.wrap_while_alive(self, _Checkpoint)


class ProductPart(Part):
    """Of a module's forward the batched product (`torch.bmm`): an unfused attention's last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, or in a second run the forward without the product."""
        if not _running or _running[-1] is None:
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
        module = self._module()
        if module is None:
            return
        if self.before is None:
            del module.__dict__["forward"]
        else:
            module.forward = self.before

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
            flat, spec = tree_flatten(forward(*given, **kwargs))
            beside[:] = [spec, [_THROUGH if _is_activation(each) else each for each in flat]]
            return tuple(each for each in flat if _is_activation(each))

        through = iter(checkpoints.run(function, *(args[i] for i in where)))
        spec, flat = beside
        beside.clear()
        return tree_unflatten([next(through) if e is _THROUGH else e for e in flat], spec)

    def __getstate__(self) -> Any:
        return {**vars(self), "_module": self._module()}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])
        checkpoints.wrap_while_alive(self, _Checkpoint)


class _Checkpoint:
    """The function of one checkpoint: the first run without gradients, the second with."""

    def __init__(self, function: Any) -> None:
        # Without gradients there is no second run: an evaluation, a checkpoint in a checkpoint.
        self.function, self.runs_twice = function, torch.is_grad_enabled()
        self.calls: list[_Call] = []
        self.at = 0

    def __call__(self, *args: Any) -> Any:
        if not self.runs_twice:
            with _inside(None):
                return self.function(*args)
        if torch.is_grad_enabled():
            return self._again(args)
        self.shapes = tuple((a.shape, a.dtype) for a in args if isinstance(a, torch.Tensor))
        with _inside(self):
            return self.function(*args)

    def run(self, part: Part, function: Any, args: Any, kwargs: Any) -> Any:
        """A part's function, in this checkpoint's first or second run."""
        if torch.is_grad_enabled():
            return self._next(part).again(function, args, kwargs)
        call = _Call(part, (self.shapes, part.trained()))
        self.calls.append(call)
        with _inside(None):  # checkpoints inside a part are ordinary ones
            return call.once(function, args, kwargs)

    def _next(self, part: Part) -> _Call:
        call = self.calls[self.at] if self.at < len(self.calls) else None
        self.at += 1
        if call is None or call.part is not part:
            raise ApplyError(
                f"A checkpoint's recompute ran {part.name}, its forward had run "
                f"{call.part.name if call else 'nothing more'} there: the layer's forward depends "
                "on more than its inputs. Recompute it as Megatron does: +all."
            )
        return call

    def _again(self, args: tuple[Any, ...]) -> Any:
        known = all(call.is_known() for call in self.calls)
        states = None if known else checkpoints.generator_states()
        outputs = self._run_again(args)
        if not known and _learn(outputs, self.calls):
            checkpoints.set_generator_states(states)
            outputs = self._run_again(args)
        for call in self.calls:
            call.let_go()
        self.calls = []
        return outputs

    def _run_again(self, args: tuple[Any, ...]) -> Any:
        self.at = 0
        with _inside(self):
            return self.function(*args)


@contextmanager
def _inside(checkpoint: _Checkpoint | None) -> Iterator[None]:
    _running.append(checkpoint)
    try:
        yield
    finally:
        _running.pop()


class _Slot(NamedTuple):
    """A saved tensor that is a view of an input."""

    number: int
    """Of the input."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call:
    """One call of a part, from its forward to its backward."""

    def __init__(self, part: Part, key: Key) -> None:
        self.part, self.key = part, key
        self.runs_again = False
        """The second run runs it as any other function."""
        self.inputs: list[torch.Tensor] | None = None  # of the second run
        self.gradients: list[Any] = []  # of the inputs; the graph refers to this list, not to self
        self.states: Any = None  # of the generators afterwards, if the part drew numbers
        self.wanted: set[int] = set()
        """Numbers of the inputs of which something was dropped."""

    def is_known(self) -> bool:
        """Whether it is known which outputs the second run reads."""
        return self.runs_again or self.key in self.part.reads

    # -------------------------------------------------------------------------------- first run

    def once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = self.part.reads.get(self.key)
        if not self.part.keeps and reads is not None and any(reads):
            self.runs_again = True
            return function(*args, **kwargs)
        before = checkpoints.generator_states() if self.part.draws else None
        with torch.enable_grad():
            count = self.part.inputs
            versions = [each._version for each in args[:count]]
            cut = [each.detach() for each in args[:count]]
            inputs = _Entry.apply(self.gradients, _token(), *cut)
            outputs = function(*inputs, *args[count:], **kwargs)
        if self.part.draws:
            after = checkpoints.generator_states()
            self.states = None if _equal(before, after) else after
        unchanged = {n for n, each in enumerate(inputs) if each._version == versions[n]}
        return self._cut(inputs, unchanged, outputs, reads)

    def _cut(
        self, inputs: Sequence[torch.Tensor], unchanged: set[int], outputs: Any, reads: Any
    ) -> Any:
        self.flat, self.spec = tree_flatten(outputs)
        self.live = [i for i, e in enumerate(self.flat) if _is_activation(e) and e.requires_grad]
        self.edges = [get_gradient_edge(self.flat[i]) for i in self.live]
        if not self.live or not self._drop(inputs, unchanged):
            self.runs_again, self.edges = True, []
            self.flat = [e.detach() if _is_activation(e) else e for e in self.flat]
            return tree_unflatten(self.flat, self.spec)
        self.geometry = [(each.size(), each.stride(), each.storage_offset()) for each in inputs]
        made = [self.flat[i].detach() for i in self.live]
        self.kept = [
            each if self.part.keeps and (reads is None or reads[n]) else _nan(each)
            for n, each in enumerate(made)
        ]
        for i in self.live:
            self.flat[i] = None
        return self._outputs(made)

    def _outputs(self, activations: Sequence[torch.Tensor]) -> Any:
        result = list(self.flat)
        for i, each in zip(self.live, activations, strict=True):
            result[i] = each
        return tree_unflatten(result, self.spec)

    def _drop(self, inputs: Sequence[torch.Tensor], unchanged: set[int]) -> bool:
        """Drop what the graph saved of its inputs, but of those that it changed in place.

        Returns:
            False where somebody else's hooks are on what is saved, which can have no others.
        """
        storages = {inputs[n].untyped_storage()._cdata: n for n in unchanged}
        nodes = [edge.node for edge in self.edges]
        seen: set[Node | None] = {None, inputs[0].grad_fn}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
            for saved, value in _saved(node):
                number = storages.get(value.untyped_storage()._cdata)
                if number is not None and value.dtype == inputs[number].dtype:
                    slot = _Slot(number, value.size(), value.stride(), int(value.storage_offset()))
                    fill = functools.partial(_fill, weakref.ref(self))
                    try:
                        saved.register_hooks(functools.partial(_put, slot), fill)
                    except RuntimeError:
                        return False
                    self.wanted.add(number)
        return True

    # ------------------------------------------------------------------------------- second run

    def again(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.runs_again:
            return function(*args, **kwargs)
        if self.part.instead is not None:
            self.part.instead(self.part.owner)
        if self.states is not None:
            checkpoints.set_generator_states(self.states)
        inputs = args[: self.part.inputs]
        self.inputs = [each.detach() for each in inputs]
        outputs = _Reattach.apply(self, _token(), *inputs)
        self.node = outputs[0].grad_fn
        return self._outputs(outputs)

    def let_go(self) -> None:
        """After the second run: its graph has all that is still needed."""
        self.kept, self.node = [], None

    def run_backward(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the inputs, from those of the outputs."""
        arrived = [(e, g) for e, g in zip(self.edges, gradients, strict=True) if g is not None]
        self.edges = []
        if arrived:
            torch.autograd.backward([e for e, _ in arrived], [g for _, g in arrived])
        found = list(self.gradients) or [None] * len(self.geometry)
        self.gradients.clear()
        self.inputs = None
        return found

    def fill(self, slot: _Slot) -> torch.Tensor:
        """What was dropped, as a view of the recomputed input."""
        if self.inputs is None:
            raise ApplyError(
                f"The backward of {self.part.name} ran without its recompute, or twice."
            )
        again, was = self.inputs[slot.number], self.geometry[slot.number]
        if (again.size(), again.stride()) != was[:2]:
            raise ApplyError(
                f"{self.part.name} was recomputed with an input of {tuple(again.size())}, strides "
                f"{again.stride()}; in forward it had {tuple(was[0])}, strides {was[1]}. "
                "Recompute the layer as Megatron does: +all."
            )
        offset = slot.offset - was[2] + again.storage_offset()
        return again.as_strided(slot.size, slot.stride, offset)


class _Entry(torch.autograd.Function):
    """A part's inputs, cut off from what made them; receives their gradients."""

    @staticmethod
    def forward(ctx: Any, found: list[Any], _: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.found[:] = gradients
        return (None, None, *[None] * len(gradients))


class _Reattach(torch.autograd.Function):
    """What stands for a part's outputs in the second run."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in call.kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call, ctx.call = ctx.call, None
        found = call.run_backward(gradients)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *[g if w else None for g, w in zip(found, wanted, strict=True)])


def _put(slot: _Slot, _: torch.Tensor) -> _Slot:
    return slot


def _fill(call: weakref.ref[_Call], slot: _Slot) -> torch.Tensor:
    found = call()
    assert found is not None  # the graph that asks is the call's
    return found.fill(slot)


@functools.cache
def _token() -> torch.Tensor:
    return torch.zeros(0, requires_grad=True)


@functools.cache
def _nan_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return never_count(torch.full((), float("nan"), dtype=dtype, device=device))


def _nan(like: torch.Tensor) -> torch.Tensor:
    """NaN of the same shape, in the memory of one element."""
    return _nan_of(like.dtype, like.device).expand(like.shape)


def _is_activation(each: Any) -> bool:
    return (
        isinstance(each, torch.Tensor)
        and not isinstance(each, torch.nn.Parameter)
        and each.is_floating_point()
    )


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


@functools.cache
def _saved_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _saved(node: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """The handle and the tensor of all that a node saved."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        handles = getattr(node, name)
        values = getattr(node, name.removeprefix("_raw"), None)
        if name == "_raw_saved_tensors":  # of a torch.autograd.Function, or of an op with a list
            values = getattr(node, "saved_tensors", values)
        several = isinstance(handles, (tuple, list))
        pairs = zip(handles, values, strict=True) if several and values else [(handles, values)]
        yield from ((handle, each) for handle, each in pairs if isinstance(each, torch.Tensor))


def _learn(outputs: Any, calls: Sequence[_Call]) -> bool:
    """Learn from the graph of a second run which outputs of parts it reads: those on which a saved
    floating-point tensor depends, or an input that another part wants. Masks of dropout depend on
    shapes alone.

    Returns:
        Whether a part's output is read that was not kept; that part is to run again.
    """
    parts = {call.node: call for call in calls if not call.runs_again}
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
            if any(value.is_floating_point() for _, value in _saved(node)):
                read |= of
    return any([_note(call, node, read) for node, call in parts.items()])


def _note(call: _Call, node: Node, read: set[tuple[Node, int]]) -> bool:
    reads = tuple((node, n) in read for n in range(len(call.live)))
    call.part.reads[call.key] = reads
    call.runs_again = not call.part.keeps and any(reads)
    return call.runs_again


def _in_order(outputs: Any) -> Iterator[Node]:
    """The nodes of a graph, each after all that it leads to."""
    found = (each.grad_fn for each in tree_flatten(outputs)[0] if isinstance(each, torch.Tensor))
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
