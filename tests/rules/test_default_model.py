"""New tests build the default model, a HybridModel where Megatron has one (default_model.py)."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GPT = {"GPTModel", "SmallGPT", "build_gpt", "tiny_gpt"}
"""Names by which a test gets a GPTModel, besides a `Shape` with num_layers."""
BUILDERS = {"support.py", "default_model.py", "hybrid_models.py", "rules/test_default_model.py"}
GPT_IS_THE_SUBJECT = {
    "compat/test_rules.py": "rules of GPT's layers; of a HybridModel's in runtime/test_hybrid.py",
    "meta/test_meta_step.py": "GPT's chunks on meta tensors; meta/test_hybrid.py",
    "meta/test_without_cuda.py": "Megatron without CUDA, whose HybridModel needs more stand-ins",
    "one_device/test_profiling.py": "a job's layers beside the same job; hybrid jobs at its end",
    "runtime/test_any_loop.py": "the GPT of examples/loops; as a HybridModel in test_loops.py",
    "runtime/test_apply.py": "GPT's layers one by one; runtime/test_hybrid.py",
    "runtime/test_equality.py": "GPT's layers one by one; runtime/test_hybrid.py",
    "runtime/test_hybrid.py": "GPT with one layer for several depths, beside a HybridModel",
    "runtime/test_measurement.py": "a GPT layer's bytes as published formulas have them",
    "runtime/test_offload.py": "GPT's modules one by one; a HybridModel beside them",
    "runtime/test_ahead.py": "the order of layers in pipelines, which is every model's",
    "runtime/test_run_once.py": "GPT layers and their products one by one; test_hybrid.py",
    "runtime/test_probe.py": "hooks of GPTModel's own forward",
}
"""Why a file's GPTModel is what it tests, and where the same is asked of a HybridModel."""
OLDER = {
    "compare/test_recorded_step.py",
    "compat/test_interrupted.py",
    "meta/test_pipeline_against_megatron.py",
    "meta/test_verify.py",
    "runtime/test_config_field.py",
    "runtime/test_overhead.py",
    "runtime/test_step_memory.py",
}
"""From before there was a HybridModel; they stay for megatron-core 0.16. Never add to it."""


def gpt_in(source: str) -> set[str]:
    """The names by which a test's source builds a GPTModel."""
    tree, found = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & GPT
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Shape":
            named = {keyword.arg for keyword in node.keywords}
            if node.args or "num_layers" in named:
                found.add("Shape")
    return found


def test_a_model_that_is_not_the_subject_is_the_default_one():
    sources = {p.relative_to(TESTS).as_posix(): p.read_text() for p in TESTS.rglob("*.py")}
    found = {name for name, source in sources.items() if gpt_in(source)} - BUILDERS
    assert found == GPT_IS_THE_SUBJECT.keys() | OLDER, (
        "Take the model from tests/default_model.py, or say here why it has to be a GPTModel; a "
        "file that builds none any more leaves the list."
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from tests.support import tiny_gpt, one_step", {"tiny_gpt"}),
        ("from megatron.core.models.gpt import GPTModel", {"GPTModel"}),
        ("SHAPE = Shape(num_layers=4, seq_length=8)", {"Shape"}),
        ("SHAPE = comparison.Shape(4, 64)", {"Shape"}),
        ("SHAPE = Shape(**layers(4), seq_length=8)", set()),
    ],
)
def test_a_gpt_in_a_test_is_found(source, names):
    assert gpt_in(source) == names
