"""The seam of patches/README.md: with it in Megatron's sources, this package needs no patch."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from megatron_autorecompute.compat import versions
from megatron_autorecompute.compat.versions import Version

pytestmark = [
    pytest.mark.newest_version,
    pytest.mark.skipif(versions.installed() < Version("0.19"), reason="the diff is for 0.19 on"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "patches" / "README.md").read_text()
DIFF = (ROOT / "patches" / "seam.diff").read_text()
(ENTRY_POINTS,) = re.findall(r'^\[project\.entry-points\."(.*?)^```$', PAGE, re.M | re.S)
LEFT_OUT = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with the installed Megatron, changed by the diff, and the page's entry points."""
    folder = tmp_path_factory.mktemp("seam")
    installed = Path(megatron.core.__file__).parents[1]
    shutil.copytree(installed, folder / "megatron", ignore=LEFT_OUT)
    for words in (["init", "--quiet"], ["apply", "-"]):
        subprocess.run(["git", *words], cwd=folder, input=DIFF, text=True, check=True)
    plugin = folder / "megatron_plugin-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-plugin\nVersion: 1\n")
    group, lines = ENTRY_POINTS.split('"]\n', 1)
    (plugin / "entry_points.txt").write_text(f"[{group}]\n{lines.replace(chr(34), '')}")
    return folder


TRAINED = """
import sys
import torch
from megatron_autorecompute.compat import seam
from megatron_autorecompute.meta import without_cuda
from tests.default_model import tiny_model
from tests.support import microbatch, start_parallel, tiny_config
import megatron.core
assert megatron.core.__file__.startswith(sys.argv[1]), megatron.core.__file__

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with without_cuda.activate():
    start_parallel()
    from megatron.core.transformer import transformer_block
    own = transformer_block.checkpointed_forward
    found = []
    for policy in (None, "full*1,none*1,full*1,none*1"):
        start_parallel()
        fields = {} if policy is None else {"recompute_policy": policy}
        (model,) = tiny_model(tiny_config(**fields))
        calls = []
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda layer, _: calls.append(layer.layer_number))
        loss = model(**microbatch())
        loss.sum().backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()], sorted(calls)))
    (plain, grads, once), (loss, same, again) = found
    assert transformer_block.checkpointed_forward is own  # nothing of Megatron was replaced
    assert torch.equal(plain, loss)
    assert all(map(torch.equal, grads, same))
    assert once == [1, 2, 3, 4], once
    assert again == [1, 1, 2, 3, 3, 4], again
print("trained")
"""


def test_a_megatron_with_the_seam_runs_a_policy_without_patch_or_launcher(sources):
    paths = f"{sources}:{ROOT}"
    code = f"import sys; sys.path[:0] = {paths.split(':')!r}\n{TRAINED}"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(sources)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("trained\n")


def test_without_a_plugin_the_seam_leaves_every_function_as_it_is(sources):
    extensible = runpy.run_path(str(sources / "megatron" / "core" / "plugins.py"))["extensible"]
    assert extensible(extensible) is extensible
