"""Write the three example profiles from published formulas and stated assumptions.

Nothing in them is measured. They show what a profile looks like, and are good enough to try the
commands with. Bytes per layer in 16 bit follow Korthikanti et al. 2022 where attention is unfused;
times are floating-point operations at a stated share of the device's peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_autorecompute.profile import (
    ChoiceRecord,
    Imbalance,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StaticBytes,
)


@dataclass(frozen=True)
class Device:
    """What times are computed with."""

    name: str
    peak_flops: float
    efficiency: float
    bytes_per_second: float

    def ms(self, flops: float, moved_bytes: float = 0.0) -> float:
        """Milliseconds of some arithmetic and, one after the other, some traffic."""
        seconds = flops / (self.peak_flops * self.efficiency)
        return round((seconds + moved_bytes / self.bytes_per_second) * 1e3, 4)


A100 = Device("A100-80GB", 312e12, 0.45, 1.6e12)
H100 = Device("H100-80GB", 989e12, 0.40, 2.6e12)


def choice(
    name: str,
    unit: int,
    held: float,
    forward: float,
    backward: float,
    times_ms: tuple[float, float],
) -> ChoiceRecord:
    """Bytes in units of one hidden state element count, sequence * micro-batch * hidden / tp."""
    sizes = (round(part * unit) for part in (held, forward, backward))
    return ChoiceRecord(name, *sizes, *times_ms, spread_ms=0.0, source="assumed")


def static(parameters: float, data_parallel: int) -> StaticBytes:
    """bf16 weights, fp32 gradients, Adam's master weights and moments sharded over dp."""
    count = round(parameters)
    return StaticBytes(2 * count, 4 * count, 12 * count // data_parallel)


def gpt_760m() -> Profile:
    """48 layers, hidden 1536, 16 heads, sequence 1024, micro-batch 8, unfused attention."""
    hidden, heads, seq, micro, layers, vocab = 1536, 16, 1024, 8, 48, 50304
    unit = seq * micro * hidden
    scores = 5 * heads * seq / hidden  # Korthikanti et al.: softmax, dropout mask and output
    matrix = A100.ms(24 * unit * hidden)
    attention = A100.ms(4 * seq * unit, 3 * scores * unit)
    forward = round(matrix + attention, 4)
    mlp = A100.ms(16 * unit * hidden)

    def one(name: str, held: float, reach: float, again_ms: float) -> ChoiceRecord:
        times = (forward, round(2 * forward + again_ms, 4))
        return choice(name, unit, held, min(10 + 0.8 * (reach - held), 60), reach - held, times)

    choices = (
        one("none", 34 + scores, 62 + scores, 0.0),
        one("full", 2, 64 + scores, forward),
        one("selective[core_attn]", 34, 66 + scores, attention),
        one("selective[mlp]", 18 + scores, 64 + scores, mlp),
        one("selective[core_attn+mlp]", 18, 67 + scores, attention + mlp),
        one("selective[core_attn+layernorm+mlp]", 14, 68 + scores, attention + mlp + 0.08),
    )
    table = A100.ms(2 * unit * vocab)
    return Profile(
        Model("gpt-760m-48l", layers, facts={"hidden_size": hidden, "num_attention_heads": heads}),
        Parallelism(micro, seq),
        (LayerKind("dense", tuple(range(layers)), choices, static=static(12 * hidden**2, 1)),),
        embedding=choice("none", unit, 1.5, 4, 4, (0.2, 0.4)),
        head=choice("none", seq * micro, 6.0 * vocab, 4.0 * vocab, 4.0 * vocab, (table, 2 * table)),
        boundary_bytes=2 * unit,
        embedding_static=static(vocab * hidden, 1),
        head_static=static(vocab * hidden, 1),
        assumptions=_assumptions(A100, "unfused attention with dropout, no tensor parallelism"),
    )


def llama3_70b() -> Profile:
    """80 layers, hidden 8192, sequence 8192, tp 8 with sequence parallelism, fused attention."""
    hidden, ffn, seq, layers, vocab, tp = 8192, 28672, 8192, 80, 128256, 8
    unit = seq * hidden // tp
    wide = ffn / hidden
    weights = 2.25 * hidden**2 + 3 * hidden * ffn
    forward = H100.ms((2 * seq * weights + 2 * seq * seq * hidden) / tp)
    mlp = H100.ms(6 * seq * hidden * ffn / tp)
    norms = H100.ms(0, 8 * unit)
    held = 14.5 + 6 * wide - 2
    choices = (
        choice("none", unit, held, 4, 8 + 2 * wide, (forward, 2 * forward)),
        choice("full", unit, 2, 10 + 4 * wide, held + 8 + 2 * wide, (forward, 3 * forward)),
        choice(
            "selective[layernorm]", unit, held - 4, 8, 12 + 2 * wide, (forward, 2 * forward + norms)
        ),
        choice(
            "selective[mlp]",
            unit,
            held - 6 * wide,
            4 + 6 * wide,
            10 + 8 * wide,
            (forward, 2 * forward + mlp),
        ),
        choice(
            "selective[layernorm+mlp]",
            unit,
            held - 6 * wide - 4,
            8 + 6 * wide,
            14 + 8 * wide,
            (forward, round(2 * forward + mlp + norms, 4)),
        ),
    )
    table = H100.ms(2 * seq * hidden * vocab / tp)
    logits = seq * vocab // tp
    return Profile(
        Model("llama3-70b", layers, facts={"hidden_size": hidden, "ffn_hidden_size": ffn}),
        Parallelism(1, seq, tensor_parallel=tp, sequence_parallel=True),
        (
            LayerKind(
                "dense",
                tuple(range(layers)),
                choices,
                inert={"selective[core_attn]": "none"},
                static=static(weights / tp, 16),
            ),
        ),
        embedding=choice("none", unit, 1, 3, 3, (0.1, 0.3)),
        head=choice("none", logits, 6, 4, 4, (table, 2 * table)),
        boundary_bytes=2 * unit,
        embedding_static=static(vocab * hidden / tp, 16),
        head_static=static(vocab * hidden / tp, 16),
        assumptions=_assumptions(H100, "fused attention holds no scores; 16 data-parallel ranks"),
    )


def moe_16b() -> Profile:
    """28 layers, first dense, then 64 experts, 8 of them active, over 8 ranks; hidden 2048."""
    hidden, seq, layers, vocab, top, expert_ffn, dense_ffn = 2048, 4096, 28, 102400, 8, 1408, 10944
    unit = seq * hidden
    attention_flops = 8 * unit * hidden + 4 * seq * unit

    def kind(name: str, indices: tuple[int, ...], ffn: float, module: str) -> LayerKind:
        wide = ffn / hidden
        forward = H100.ms(attention_flops + 6 * unit * ffn, 20 * unit * (module == "moe"))
        again = H100.ms(6 * unit * ffn, 20 * unit * (module == "moe"))
        act = H100.ms(0, 6 * wide * unit)
        base, ffn_held = 14.0, 6 * wide + (4 * top if module == "moe" else 0)
        reach = base + ffn_held + 10 + 2 * wide

        def one(name: str, held: float, extra: float, again_ms: float) -> ChoiceRecord:
            times = (forward, round(2 * forward + again_ms, 4))
            return choice(name, unit, held, 6 + 0.5 * extra, reach - held + 2, times)

        choices = [
            one("none", base + ffn_held, 0, 0.0),
            one("full", 2, base + ffn_held, forward),
            one(f"selective[{module}]", base, ffn_held, again),
            one("selective[layernorm]", base + ffn_held - 4, 4, H100.ms(0, 8 * unit)),
        ]
        if module == "moe":
            choices.append(one("selective[moe_act]", base + ffn_held - 2 * wide, 2 * wide, act))
        uneven = (Imbalance(50.0, 1.0), Imbalance(95.0, 1.15), Imbalance(99.0, 1.35))
        weights = 4 * hidden**2 + 3 * hidden * (expert_ffn * 8 if module == "moe" else ffn)
        return LayerKind(
            name,
            indices,
            tuple(choices),
            inert={"selective[core_attn]": "none"},
            imbalance=uneven if module == "moe" else (),
            static=static(weights, 16),
        )

    table = H100.ms(2 * unit * vocab)
    return Profile(
        Model("moe-16b", layers, facts={"hidden_size": hidden, "num_moe_experts": 64}),
        Parallelism(1, seq, expert_parallel=8),
        (
            kind("dense", (0,), dense_ffn, "mlp"),
            kind("moe", tuple(range(1, layers)), expert_ffn * top, "moe"),
        ),
        embedding=choice("none", unit, 1, 3, 3, (0.1, 0.3)),
        head=choice("none", seq * vocab, 6, 4, 4, (table, 2 * table)),
        boundary_bytes=2 * unit,
        embedding_static=static(vocab * hidden, 16),
        head_static=static(vocab * hidden, 16),
        assumptions=_assumptions(H100, "balanced routing is the measured case; see imbalance"),
    )


def _assumptions(device: Device, more: str) -> tuple[str, ...]:
    return (
        "No figure is measured; bytes are counted by formula.",
        f"Times: {device.name} at {device.efficiency:.0%} of its peak.",
        f"{more[0].upper()}{more[1:]}.",
    )


def main() -> None:
    """Write all three beside this file."""
    for profile in (gpt_760m(), llama3_70b(), moe_16b()):
        profile.save(Path(__file__).parent / f"{profile.model.name}.json")


if __name__ == "__main__":
    main()
