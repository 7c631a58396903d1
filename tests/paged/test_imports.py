"""What an import may load and what it may not need, each asked in a fresh process."""

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "numpy", "matplotlib")

BLOCKER = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # importing it raises ImportError; find_spec finds nothing
"""


def run_python(code, *, without=(), env=None):
    """Run `code` in a fresh interpreter in which the packages `without` cannot be imported."""
    code = BLOCKER.format(names=tuple(without)) + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_gpu():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def test_import_paged_loads_no_heavy_library():
    loaded = run_python("import paged\nprint(*sys.modules)").split()
    assert "paged" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)


def test_every_public_name_is_reachable_without_heavy_libraries():
    code = (
        "import paged\nfor name in paged.__all__: getattr(paged, name)\nprint(len(paged.__all__))"
    )
    assert int(run_python(code, without=HEAVY)) > 10


MANAGER_AT_WORK = """
from paged import BlockSpaceManager, CacheConfig, Sequence, SequenceGroup

manager = BlockSpaceManager(CacheConfig(block_size=2, num_gpu_blocks=8, num_cpu_blocks=8))
seq = Sequence("a", [1, 2, 3])
assert manager.can_allocate(seq).name == "OK"
manager.allocate(seq)
manager.mark_computed(seq, 3)
child = seq.fork("b")
manager.fork(seq, child)
child.append_token(4)
assert len(manager.append_slots(child)) == 1
group = SequenceGroup("r", [seq, child])
assert len(manager.swap_out(group)) == len(manager.swap_in(group)) == 3
manager.trim(child, 2)
manager.check_invariants()
manager.free(seq)
manager.free(child)
manager.reset_prefix_cache()
print(manager.stats().gpu.num_used)
"""

ALLOCATORS_AT_WORK = """
from paged import BuddyAllocator, NaiveBlockAllocator, PrefixCachingBlockAllocator

for allocator in (NaiveBlockAllocator(8), PrefixCachingBlockAllocator(8, 2)):
    blocks = allocator.allocate(3)
    allocator.share(blocks)
    allocator.free(blocks)
    allocator.free(blocks)
    assert allocator.num_free == allocator.num_blocks == 8
buddy = BuddyAllocator(8)
buddy.free(buddy.allocate(3))
print(buddy.num_free)
"""


@pytest.mark.parametrize("blocked", [*HEAVY, "all"])
def test_manager_works_when_a_heavy_library_cannot_be_imported(blocked):
    without = HEAVY if blocked == "all" else (blocked,)
    assert run_python(MANAGER_AT_WORK, without=without).split() == ["0"]


def test_allocators_work_without_heavy_libraries():
    assert run_python(ALLOCATORS_AT_WORK, without=HEAVY).split() == ["8"]


ATTEND = """
import torch, paged_kernels

query = torch.zeros(1, 1, 16)
cache = torch.ones(2, 4, 1, 16)
table = torch.tensor([[1]], dtype=torch.int32)
out = paged_kernels.paged_attention(query, cache, cache, table, torch.tensor([3], dtype=torch.int32))
assert torch.equal(out, torch.ones(1, 1, 16)), out
print(out.shape[0])
"""


def test_import_paged_kernels_needs_no_gpu():
    assert run_python(ATTEND, env=without_gpu()).split() == ["1"]


def test_paged_kernels_offers_torch_without_triton():
    assert run_python(ATTEND, without=("triton",), env=without_gpu()).split() == ["1"]


def test_paged_kernels_names_the_absent_backend_without_triton():
    call = ATTEND.replace("dtype=torch.int32))", 'dtype=torch.int32), backend="triton")')
    code = f"try:\n    exec({call!r})\nexcept (ValueError, TypeError, ImportError) as error: print(error)"
    assert "triton" in run_python(code, without=("triton",), env=without_gpu())


def test_paged_kernels_never_imports_paged():
    assert run_python("import paged_kernels\nprint(1)", without=("paged",)).split() == ["1"]


def test_kernels_folder_shadows_no_other_package():
    # A regular package named `kernels` on sys.path breaks a popular library that probes for it.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_triton_is_required_on_linux_only():
    triton = [line for line in requires("paged") if line.startswith("triton")]
    assert triton and all("platform_system" in line and "Linux" in line for line in triton)
