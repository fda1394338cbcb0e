"""What every layer recomputes, and what of it goes to host memory meanwhile: `LayerPolicy` for one
layer, `RecomputePolicy` for all of them.

Layer indices are 0-based and global over the whole model; multi-token-prediction depth d is layer
`num_layers + d`. This module checks the grammar only. `compat` asks the installed Megatron which
module names exist and which choices a model allows.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_autorecompute.block_names import (
    DECODER,
    MEGATRON,
    Blocks,
    parts_of_field,
    placed,
    policy_in,
    read_file,
    within,
)
from megatron_autorecompute.errors import PolicyError

Granularity = Literal["none", "selective", "inner", "full"]

_OFFLOAD = r"(?:\+offload\[(?P<offload>[^\]]*)\])?"
_AGAIN = r"(?:\+keep\[(?P<keep>[^\]]*)\]|(?P<all>\+all))?(?P<ahead>\+ahead)?"
_CHOICE = re.compile(
    r"(?:none|full(?:/(?P<group>\d{1,18})|\+inner/(?P<again>\d{1,18}))?"
    r"|inner/(?P<inner>\d{1,18})|selective\[(?P<modules>[^\]]*)\])" + _AGAIN + _OFFLOAD
)
_MODULE = re.compile(r"[a-z][a-z0-9_]*")
WHOLE_LAYER = "cpu_offloading"
"""Stands alone in `LayerPolicy.offload` for the whole layer, as Megatron's setting moves it."""
_MEGATRON = re.compile(
    r"megatron:(?:(?P<method>uniform|block|cpu_offloading)/(?P<n>\d{1,18})"
    r"|offload\[(?P<alone>[^\]]*)\]"
    r"|(?:none|selective(?:\[(?P<modules>[^\]]*)\])?)" + _OFFLOAD + ")"
)
CHOICE = (
    "none, full, full/N (one checkpoint around N layers) or selective[MODULE+MODULE], and inner/N "
    "or full+inner/N for the stack inside a multi-token-prediction depth; full and selective[moe] "
    "take +keep[PART+…] (runs once), full and selective +all (reruns all that Megatron reruns); "
    "full takes +ahead (reruns while a pipeline stage waits for the gradient); "
    "none and selective take +offload[MODULE+…]"
)
GRAMMAR = (
    f"a policy is a comma-separated list of CHOICE*COUNT, CHOICE being {CHOICE}; "
    "or one CHOICE for all layers; or megatron:none, megatron:selective[MODULE+…], "
    "megatron:offload[MODULE+…], megatron:block/N, megatron:uniform/N, megatron:cpu_offloading/N; "
    "or @FILE; in a model of several blocks also NAME:POLICY;NAME:POLICY; or megatron:POLICY, the "
    "choices as Megatron's own checkpoints run them"
)


OWN_MODULES = ("experts", "ln_out", "mlp_act", "qkv")
"""Modules that Megatron's checkpoints lack; `runtime.layer_checkpoints` puts ours around them."""
ALL = "+all"
"""Marks a choice's text where `LayerPolicy.rerun_all` is true."""
AHEAD = "+ahead"
"""The end of a choice's text where `LayerPolicy.ahead` is true."""
KEPT_IN_MOE = ("dispatch",)
"""Parts inside the module moe, which alone can be kept with it."""
HAVE_DEAD_WORK = frozenset({"core_attn", "mlp", "moe"})
"""Modules whose checkpoints in Megatron rerun work that no backward reads; so does full."""


@dataclass(frozen=True, slots=True, order=True)
class LayerPolicy:
    """What one layer recomputes in its backward, and which activations wait in host memory for it;
    `str()` gives the text that `parse` reads."""

    granularity: Granularity = "none"
    """Megatron's `recompute_granularity`, with `none` for no recompute, and `inner` for checkpoints
    inside a multi-token-prediction depth alone."""

    modules: tuple[str, ...] = ()
    """Megatron's `recompute_modules`, sorted; not empty exactly when selective."""

    group: int = 1
    """How many consecutive full layers share one checkpoint; 1 unless granularity is full."""

    inner: int = 0
    """How many of the first layers inside a multi-token-prediction depth have a checkpoint each,
    where the depth is a stack (HybridModel). With full these layers are also inside the depth's
    checkpoint, so a backward reruns them twice."""

    offload: tuple[str, ...] = ()
    """Megatron's `offload_modules`, sorted, or `WHOLE_LAYER`; only with none and selective."""

    keep: tuple[str, ...] = ()
    """Parts inside the checkpoint that run once, and whose output is kept; sorted. Only with full
    without inner layers, and `KEPT_IN_MOE` with selective[moe]."""

    rerun_all: bool = False
    """Whether the layer also reruns dead work: what Megatron's own checkpoints rerun and no
    backward reads. False where there is none: without full and `HAVE_DEAD_WORK`, and beside offload
    and inner layers, where Megatron's checkpoints run unchanged."""

    ahead: bool = False
    """Whether the recompute begins before the gradient is there, while a pipeline stage waits for
    it; only with full without inner layers. Where nothing waits, as under the loss, it does
    nothing."""

    def __post_init__(self) -> None:
        self._check_names()
        for is_broken, rule in self._rules():
            if is_broken:
                raise PolicyError(f"{rule}; found {self!r}.")
        for name in ("modules", "offload", "keep"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        object.__setattr__(self, "rerun_all", self.rerun_all and self.has_dead_work)

    def _check_names(self) -> None:
        for name in ("modules", "offload", "keep"):
            if isinstance(text := getattr(self, name), str):
                raise PolicyError(f"{name} is the text {text!r:.80}: write ({text!r:.80},).")
        for module in (*self.modules, *self.offload, *self.keep):
            if not _MODULE.fullmatch(module):
                raise PolicyError(f"{module!r} is not a module name such as core_attn.")

    def _rules(self) -> Iterator[tuple[object, str]]:
        """Whether each rule is broken, and the rule."""
        kind, whole = self.granularity, self.granularity == "full" and not self.inner
        in_moe = "moe" in self.modules and set(self.keep) <= set(KEPT_IN_MOE)
        yield kind not in get_args(Granularity), "A granularity is none, selective, inner or full"
        yield (kind == "selective") != bool(self.modules), "Modules go with selective, and only so"
        yield (
            self.group < 1 or (self.group > 1 and not whole),
            "A group is 1 or more layers, and goes with full without inner layers",
        )
        yield (
            self.inner < (kind == "inner") or (self.inner and kind not in ("inner", "full")),
            "Inner layers are inner/N or full+inner/N, N being 1 or more layers",
        )
        yield (
            self.offload and kind not in ("none", "selective"),
            "Offload goes with none and selective: full recompute leaves only inputs to offload",
        )
        yield (
            WHOLE_LAYER in self.offload and (len(set(self.offload)) > 1 or self.modules),
            f"{WHOLE_LAYER} moves the whole layer, without other modules",
        )
        yield (
            self.keep and not whole and not in_moe,
            "+keep goes with full without inner layers, and dispatch with selective[moe]",
        )
        yield (
            self.keep and (self.rerun_all or self.offload),
            "+keep goes without +all and +offload: Megatron's own checkpoints keep no part",
        )
        yield self.ahead and not whole, "+ahead goes with full without inner layers"

    @property
    def has_dead_work(self) -> bool:
        """Whether Megatron's own checkpoints for this choice rerun work that no backward reads."""
        if self.offload or self.inner:
            return False
        return self.granularity == "full" or not HAVE_DEAD_WORK.isdisjoint(self.modules)

    @property
    def own(self) -> tuple[str, ...]:
        """Kept parts, modules and the early begin that Megatron's own checkpoints lack."""
        modules = (module for module in self.modules if module in OWN_MODULES)
        return (*self.keep, *modules, *["ahead"] * self.ahead)

    @property
    def is_megatrons(self) -> bool:
        """Whether Megatron's own checkpoints run exactly this."""
        return not self.own and (self.rerun_all or not self.has_dead_work)

    @property
    def as_megatron(self) -> LayerPolicy:
        """This choice with all that Megatron reruns for it.

        Raises: PolicyError if it has what Megatron lacks: parts, modules, an early begin."""
        if self.own:
            raise PolicyError(
                f"{self} as Megatron's own checkpoints run it: they have no {', '.join(self.own)}. "
                "Leave that out; or leave out megatron: before the policy, and "
                "--recompute-choices megatron."
            )
        return replace(self, rerun_all=True)

    @classmethod
    def parse(cls, text: str) -> LayerPolicy:
        """Read one choice; raises `PolicyError` with the grammar for anything else."""
        match = _CHOICE.fullmatch(_text(text))
        if match is None:
            raise PolicyError(f"Cannot read {text!r:.80} as a choice. A choice is {CHOICE}.")
        more: dict[str, Any] = {
            "offload": _modules(match["offload"]),
            "keep": _modules(match["keep"]),
            "rerun_all": match["all"] is not None,
            "ahead": match["ahead"] is not None,
        }
        if match["modules"] is not None:
            return cls("selective", _modules(match["modules"]), **more)
        if match["inner"] is not None:
            return cls("inner", inner=int(match["inner"]), **more)
        if text.startswith("full"):
            group, inner = int(match["group"] or 1), int(match["again"] or 0)
            return cls("full", group=group, inner=inner, **more)
        return cls(**more)

    def __str__(self) -> str:
        if self.ahead:
            return f"{self.in_time}{AHEAD}"
        if self.offload:
            return f"{self.recompute}+offload[{'+'.join(self.offload)}]"
        if self.keep:
            return f"{replace(self, keep=())}+keep[{'+'.join(self.keep)}]"
        if self.rerun_all:
            return f"{replace(self, rerun_all=False)}{ALL}"
        if self.granularity == "selective":
            return f"selective[{'+'.join(self.modules)}]"
        if self.inner:
            return f"{'full+' * (self.granularity == 'full')}inner/{self.inner}"
        return self.granularity if self.group == 1 else f"{self.granularity}/{self.group}"

    @property
    def recompute(self) -> LayerPolicy:
        """The choice that recomputes the same and offloads nothing."""
        return replace(self, offload=()) if self.offload else self

    @property
    def in_time(self) -> LayerPolicy:
        """The choice that recomputes the same when the gradient is there: the one of records."""
        return replace(self, ahead=False) if self.ahead else self


NONE = LayerPolicy()
FULL = LayerPolicy("full")
WHOLE = LayerPolicy(offload=(WHOLE_LAYER,))
"""The choice of a layer that leaves as a whole: one of the first ones under
`megatron:cpu_offloading/N`."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers with the same choice; a run of `full/g` is `count // g` checkpoints."""

    start: int
    count: int
    policy: LayerPolicy


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """A choice for every layer of a model, in layer order."""

    layers: tuple[LayerPolicy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in self.layers:
            if not isinstance(layer, LayerPolicy):
                raise PolicyError(
                    f"{layer!r:.80} is no LayerPolicy. To read texts: "
                    "RecomputePolicy.from_config(texts, num_layers=…)."
                )
        self.chunk_runs(range(len(self.layers)))

    @property
    def as_megatron(self) -> RecomputePolicy:
        """The policy that reruns all that Megatron's own checkpoints rerun.

        Raises: PolicyError if a layer has parts or modules that Megatron lacks."""
        known = dict[LayerPolicy, LayerPolicy]()
        for index, layer in enumerate(self.layers):
            try:
                known[layer] = known.get(layer) or layer.as_megatron
            except PolicyError as error:
                raise PolicyError(f"Layer {index}: {error}") from error
        return RecomputePolicy(tuple(known[layer] for layer in self.layers))

    @property
    def offloads(self) -> bool:
        """Whether any layer offloads."""
        return any(choice.offload for choice in self.layers)

    @property
    def is_ahead(self) -> bool:
        """Whether the recompute of any layer begins before its gradient is there."""
        return any(choice.ahead for choice in self.layers)

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        num_layers: int,
        layout: Sequence[Sequence[int]] | None = None,
        depth_layers: int = 0,
        blocks: Blocks | None = None,
    ) -> RecomputePolicy:
        """Read the text form, the inverse of `format`.

        Args:
            text: the grammar in `GRAMMAR`; `@FILE` reads a policy file or a plan file.
            num_layers: layers the policy must cover, multi-token-prediction depths included.
            layout: layer indices of every pipeline chunk. `megatron:block/N` and
                `megatron:uniform/N` count within a chunk. Without it there is one chunk of all
                layers. Layers that it leaves out are multi-token-prediction depths.
            depth_layers: layers of the stack inside each such depth, of a HybridModel; 0 if a depth
                has a single layer, as in a GPTModel.
            blocks: layers of each of the model's blocks, by the names that a text may use; by
                default the decoder alone.

        Raises PolicyError: unreadable text, a count that does not match `num_layers`, or the name
        of a block that the model does not have.
        """
        if num_layers < 0:
            raise PolicyError(f"A policy for {num_layers} layers: give 0 or more.")
        return _Reader(num_layers, layout, depth_layers, blocks).read(_text(text))

    @classmethod
    def from_config(
        cls, value: str | Sequence[str] | Mapping[str, Any], **model: Any
    ) -> RecomputePolicy:
        """Read the value of a config field: text, a list of choices, or a policy or plan as dict;
        or a dict with one of these for each block. Keyword arguments are those of `parse`.

        Raises: PolicyError if it is of none of these forms or covers another number of layers."""
        return _Reader(**model).read(value)

    @classmethod
    def load(cls, path: str | Path, **model: Any) -> RecomputePolicy:
        """Read a JSON file (a policy or a plan) or a text file in the policy grammar. Keyword
        arguments are those of `parse`.

        Raises: PolicyError if it cannot be read, or has no policy for `num_layers` layers."""
        return _Reader(**model).load(path)

    def format(self, blocks: Blocks | None = None) -> str:
        """The text form: one CHOICE*COUNT for each run of equal layers.

        blocks: layers of each of the model's blocks; of several, each is named.
        """
        if blocks is None or len(blocks) < 2:
            return ",".join(f"{run.policy}*{run.count}" for run in self.runs())
        parts, start = [], 0
        for name, count in blocks.items():
            own = RecomputePolicy(self.layers[start : start + count])
            parts.append(f"{name}:{own.format()}")
            start += count
        return ";".join(parts)

    def to_config(self) -> list[str]:
        """The canonical JSON and config form: one choice per layer."""
        return [str(layer) for layer in self.layers]

    def digest(self) -> str:
        """Twelve hex digits that identify the policy; ranks compare them."""
        return hashlib.sha256(self.format().encode()).hexdigest()[:12]

    def runs(self) -> tuple[Run, ...]:
        """The maximal runs of equal layers, in layer order."""
        return self.chunk_runs(range(len(self.layers)))

    def chunk_runs(self, layers: Sequence[int]) -> tuple[Run, ...]:
        """The runs within one pipeline chunk, `start` counted from the chunk's first layer.

        Raises: PolicyError if a group of full layers does not end where the chunk ends."""
        runs, start = [], 0
        for policy, members in itertools.groupby(self.layers[index] for index in layers):
            runs.append(Run(start, len(list(members)), policy))
            start += runs[-1].count
            if runs[-1].count % policy.group:
                raise PolicyError(
                    f"{policy} from layer {layers[runs[-1].start]} cannot be cut into checkpoints "
                    f"of {policy.group}: it has {runs[-1].count} of layers {layers[0]} to "
                    f"{layers[-1]}, which are the model's or a pipeline chunk's, and a checkpoint "
                    "cannot span two chunks. Give the rest a group of its own."
                )
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class MegatronStrategy:
    """One of Megatron's own settings for all layers; `str()` gives the text that `parse` reads."""

    method: Literal["none", "selective", "block", "uniform", "cpu_offloading"]
    """none, selective (the same modules on every layer), Megatron's `recompute_method`, or its
    `cpu_offloading` of whole layers."""
    modules: tuple[str, ...] = ()
    """Modules of selective; an empty tuple recomputes nothing."""
    recompute_num_layers: int = 0
    """N of block and uniform, and Megatron's `cpu_offloading_num_layers`; else 0."""
    offload: tuple[str, ...] = ()
    """Megatron's `offload_modules`, on every layer, with none and selective."""

    @classmethod
    def parse(cls, text: str) -> MegatronStrategy:
        """Read megatron:none, megatron:selective[MODULE+…], megatron:block/N, megatron:uniform/N,
        megatron:offload[MODULE+…], megatron:selective[…]+offload[…], megatron:cpu_offloading/N.

        Raises PolicyError: other text, or `uniform/0`.
        """
        match = _MEGATRON.fullmatch(_text(text))
        if match is None:
            raise PolicyError(f"Cannot read {text!r}: {GRAMMAR}.")
        if match["method"] is not None:
            method: Any = match["method"]
            if int(match["n"]) < 1 and method == "uniform":
                raise PolicyError(f"{text!r}: uniform needs at least one layer in a checkpoint.")
            return cls(method, (), int(match["n"]))
        offload = LayerPolicy(offload=_modules(match["alone"] or match["offload"])).offload
        if match["alone"] is not None or text.startswith("megatron:none"):
            return cls("none", offload=offload)
        modules = "core_attn" if match["modules"] is None else match["modules"]
        if modules == "":
            return cls("selective", offload=offload)
        chosen = LayerPolicy.parse(f"selective[{modules}]").modules
        return cls("selective", chosen, offload=offload)

    def __str__(self) -> str:
        offload = f"offload[{'+'.join(self.offload)}]" if self.offload else ""
        if self.method == "none":
            return f"megatron:{offload or 'none'}"
        if self.method == "selective":
            modules = f"megatron:selective[{'+'.join(self.modules)}]"
            return f"{modules}+{offload}" if offload else modules
        return f"megatron:{self.method}/{self.recompute_num_layers}"

    def policy(
        self, num_layers: int, layout: Sequence[Sequence[int]] | None = None, depth_layers: int = 0
    ) -> RecomputePolicy:
        """A choice for every layer; like Megatron, it counts layers afresh in every chunk. The
        arguments are those of `RecomputePolicy.parse`.

        Raises: PolicyError where Megatron refuses this setting with multi-token prediction."""
        chunks = layout or [range(num_layers)]
        granularity: Granularity = "selective" if self.modules else "none"
        same = LayerPolicy(granularity, self.modules, offload=self.offload)
        chosen, n = dict.fromkeys(range(num_layers), same), self.recompute_num_layers
        leading = [index for chunk in chunks for index in list(chunk)[:n]]
        if self.method == "cpu_offloading":
            chosen |= dict.fromkeys(leading, WHOLE)
        elif self.method == "block":
            # MultiTokenPredictionLayer skips recompute under block, with a warning; a stack inside
            # it does not.
            chosen |= dict.fromkeys(leading, FULL)
            if inner := min(n, depth_layers):
                own = LayerPolicy("inner", inner=inner)
                chosen |= dict.fromkeys(_depths(num_layers, chunks), own)
        elif self.method == "uniform":
            chosen.update(self._uniform(num_layers, chunks, depth_layers))
        return RecomputePolicy(tuple(chosen.values())).as_megatron

    def _uniform(
        self, num_layers: int, chunks: Sequence[Sequence[int]], depth_layers: int
    ) -> Iterator[tuple[int, LayerPolicy]]:
        n = self.recompute_num_layers
        for chunk in chunks:
            rest = len(chunk) % n
            whole = [LayerPolicy("full", group=n)] * (len(chunk) - rest)
            yield from zip(
                chunk, [*whole, *[LayerPolicy("full", group=max(rest, 1))] * rest], strict=True
            )
        depths = _depths(num_layers, chunks)
        if depths and n != 1:
            # MultiTokenPredictionLayer asserts recompute_num_layers == 1 under uniform.
            raise PolicyError(
                f"{str(self)!r}: Megatron allows only uniform/1 with multi-token prediction."
            )
        # The depth and the stack inside it both read the setting.
        yield from ((index, LayerPolicy("full", inner=depth_layers)) for index in depths)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads policies of one model; fields as the arguments of `RecomputePolicy.parse`."""

    num_layers: int
    layout: Sequence[Sequence[int]] | None = None
    depth_layers: int = 0
    blocks: Blocks | None = None

    def read(self, value: Any) -> RecomputePolicy:
        """The policy in a value, as `RecomputePolicy.from_config` takes it."""
        if self.blocks is None and isinstance(value, Mapping) and "profile" in value:
            value = value.get("recompute_policy")  # a plan's, of all blocks
        parts, said = parts_of_field(value), policy_in(value)
        if parts is not None:
            return self._of_blocks(parts)
        if not isinstance(said, str):
            return self._of_list(said)
        text = said.strip()
        if text.startswith("@"):
            return self.load(text[1:])
        if _MEGATRON.fullmatch(text):
            strategy = MegatronStrategy.parse(text)
            return strategy.policy(self.num_layers, self.layout, self.depth_layers)
        if text.startswith(MEGATRON):
            return self.read(text.removeprefix(MEGATRON)).as_megatron
        return self._of_text(text)

    def load(self, path: str | Path) -> RecomputePolicy:
        """The policy in a file."""
        content = read_file(path)
        try:
            return self.read(content)
        except PolicyError as error:
            raise PolicyError(f"In {path}: {error}") from error

    def _of_text(self, text: str) -> RecomputePolicy:
        if text == "auto":
            raise PolicyError("'auto' is not a policy: it must be measured and solved first.")
        runs = [_parse_run(part, text) for part in re.split(r",(?![^\[]*\])", text)]
        if len(runs) == 1 and runs[0][1] is None:
            return RecomputePolicy((runs[0][0],) * self.num_layers)
        # Checked before the list is made: a mistyped count could exceed all memory.
        counted = [(choice, 1 if count is None else count) for choice, count in runs]
        check_length(sum(count for _, count in counted), self.num_layers, text)
        return RecomputePolicy(tuple(choice for choice, n in counted for _ in range(n)))

    def _of_list(self, value: Any) -> RecomputePolicy:
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise PolicyError(
                f"recompute_policy is {value!r:.80}: expected text, a list with one choice per "
                'layer such as ["full", "none"], or a dict with the key "recompute_policy" or with '
                f"the names of all blocks ({', '.join(self.blocks or [DECODER])})."
            )
        check_length(len(value), self.num_layers, f"a list of {len(value)} choices")
        return RecomputePolicy(tuple(LayerPolicy.parse(item) for item in value))

    def _of_blocks(self, parts: Mapping[str, Any]) -> RecomputePolicy:
        layers: list[LayerPolicy] = []
        for name, part, span in placed(parts, self.blocks or {DECODER: self.num_layers}):
            block = _Reader(len(span), within(self.layout, span), self.depth_layers)
            try:
                layers += block.read(part).layers
            except PolicyError as error:
                raise PolicyError(f"Of {name}: {error}") from error
        check_length(len(layers), self.num_layers, "The policy")
        return RecomputePolicy(tuple(layers))


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise PolicyError(f"{given!r:.80} is no text: {GRAMMAR}.")
    return given


def _modules(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(module.strip() for module in text.split("+"))


def _depths(num_layers: int, chunks: Sequence[Sequence[int]]) -> list[int]:
    return sorted(set(range(num_layers)) - {index for chunk in chunks for index in chunk})


def _parse_run(part: str, text: str) -> tuple[LayerPolicy, int | None]:
    """A choice, and how many layers have it; None if that is not said."""
    name, star, count = part.strip().partition("*")
    try:
        choice = LayerPolicy.parse(name)
    except PolicyError as error:
        raise PolicyError(f"In {text!r:.160}: {error}") from error
    if star and not re.fullmatch(r"\d{1,99}", count):
        raise PolicyError(f"Cannot read {part.strip()!r:.80} in {text!r:.160}: {GRAMMAR}.")
    if star and int(count) == 0:
        raise PolicyError(f"Count {count} in {text!r}: a run has at least one layer.")
    return choice, int(count) if star else None


def check_length(covered: int, num_layers: int, asked: str) -> None:
    """Raise PolicyError if `asked` covers another number of layers than the model has."""
    if covered != num_layers:
        raise PolicyError(
            f"{asked} covers {covered} layers, the model has {num_layers} "
            "(multi-token-prediction depths included): give every layer a choice."
        )
