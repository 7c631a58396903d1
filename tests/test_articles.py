"""docs/articles.md, line by line: what is so, asked of the code."""

import re
from pathlib import Path

import pytest
import xxhash

from paged import (
    BlockSpaceManager,
    BuddyAllocator,
    CacheConfig,
    NaiveBlockAllocator,
    NoFreeBlocksError,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceGroup,
    block_bytes,
)
from paged.metrics import Metrics
from paged.trace import read_trace, sample_requests

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "articles.md").read_text()
TRACE = "AzureLLMInferenceTrace_code.csv"


def test_every_line_of_the_table_has_its_test():
    named = re.findall(r"^\| .* \| (`test_.*`) \|$", PAGE, re.MULTILINE)
    assert len(named) == 10
    names = [name for cell in named for name in re.findall(r"`(test_\w+)`", cell)]
    missing = [name for name in names if not callable(globals().get(name))]
    assert not missing


def test_64_kib_are_one_layer():
    assert block_bytes(16, 8, 128, "float16") == 65_536
    assert block_bytes(16, 8, 128, "float16", num_layers=32) == 2 * 2**20


def test_16_kb_are_other_tokens_in_each_model():
    rows = re.findall(r"^\| \S+ \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    tokens_in_16_kb = []
    for layers, kv_heads, width, cells in rows:
        shape = int(kv_heads), int(width), "float16"
        per_token, block = block_bytes(1, *shape), block_bytes(16, *shape, int(layers))
        tokens = 16 * 1024 / per_token
        unit = "token" if tokens == 1 else "tokens"
        assert cells == f"{per_token:,} | {tokens:.3g} {unit} | {block // 1024:,} KiB"
        tokens_in_16_kb.append(tokens)
    assert tokens_in_16_kb == pytest.approx([4, 1, 21.33], abs=0.01)
    assert block_bytes(1, 32, 128, "float16", 32) == 32 * 16 * 1024  # a token of Llama-2-7B


def test_fifo_and_address_order_differ():
    handed_out = {}
    for free_order in ("fifo", "first_fit"):
        pool = NaiveBlockAllocator(8, free_order)
        pool.allocate(8)
        pool.free([5, 2, 7])
        handed_out[free_order] = pool.allocate(3)
    assert handed_out == {"fifo": [5, 2, 7], "first_fit": [2, 5, 7]}


def test_the_worked_example_is_tested():
    tests = (ROOT / "tests" / "paged" / "test_worked_example.py").read_text()
    slips = re.findall(r"^- .*\n(?:  .*\n)*", tests.split('"""')[1], re.MULTILINE)
    assert len(slips) == 3 and all("In print" in slip for slip in slips)
    assert (ROOT / "docs" / "worked-example.md").read_text().count("(Slip") == 3  # one names two


def test_17_tokens_waste_the_same_in_one_block_of_32_and_two_of_16():
    blocks, waste = {}, {}
    for block_size in (16, 32):
        manager = BlockSpaceManager(CacheConfig(block_size=block_size, num_gpu_blocks=4))
        manager.allocate(Sequence("a", range(17)))
        stats = manager.stats()
        blocks[block_size], waste[block_size] = stats.gpu.num_used, stats.internal_fragmentation
    assert blocks == {16: 2, 32: 1}
    assert waste[16] == waste[32] == 15 / 32 == pytest.approx(0.47, abs=0.002)


def test_sequences_wait_for_blocks_and_not_blocks():
    manager = BlockSpaceManager(CacheConfig(num_gpu_blocks=8, enable_prefix_caching=False))
    scheduler = Scheduler(SchedulerConfig(), manager)
    for name, num_tokens in (("runs", 96), ("wants 5 blocks", 80), ("wants 7 blocks", 112)):
        scheduler.add(SequenceGroup(name, [Sequence(name, range(num_tokens))]))
    output = scheduler.schedule()
    assert [seq.seq_id for seq in output.seqs] == ["runs"]
    samples = Metrics(scheduler).text("vllm").splitlines()
    assert "vllm:num_blocks_waiting 2.0" in samples  # not the 12 blocks that the two want


class PrintedBuddy:
    """The allocator of the articles: a set of free runs per power of two, and nothing else."""

    def __init__(self, num_blocks):
        self.free_runs = [set() for _ in range(num_blocks.bit_length())]

    def allocate(self, n):
        runs = self.free_runs[(n - 1).bit_length()]
        return runs.pop() if runs else None

    def free(self, start, n):
        self.free_runs[(n - 1).bit_length()].add(start)


def test_the_printed_buddy_can_never_allocate():
    printed, ours = PrintedBuddy(64), BuddyAllocator(64)
    assert [printed.allocate(n) for n in (1, 3, 64)] == [None, None, None]
    assert [len(ours.allocate(n)) for n in (1, 3)] == [1, 4]

    # Given the whole pool to start with, it still serves nothing smaller: nothing is split.
    printed.free(0, 64)
    assert printed.allocate(3) is None
    assert printed.allocate(64) == 0
    # And given all of it back in halves, it has lost the whole: nothing is merged.
    printed.free(0, 32)
    printed.free(32, 32)
    assert printed.allocate(64) is None

    ours = BuddyAllocator(64)
    halves = [ours.allocate(32), ours.allocate(32)]
    with pytest.raises(NoFreeBlocksError):
        ours.allocate(1)
    for half in halves:
        ours.free(half)
    assert ours.allocate(64) == range(64)


def test_a_digest_is_computed_once_per_full_block():
    hashed = []

    def counting(data):
        hashed.append(data)
        return xxhash.xxh3_128_digest(data)

    manager = BlockSpaceManager(CacheConfig(num_gpu_blocks=64, hash_fn=counting))
    first, second = Sequence("first", range(70)), Sequence("second", range(70))

    def digests(work):
        hashed.clear()
        work()
        return len(hashed)

    def generate(sequence, num_tokens):
        for token in range(num_tokens):
            manager.step([sequence], [token])

    assert digests(lambda: manager.can_allocate(first)) == 4
    assert digests(lambda: manager.allocate(first)) == 0
    assert digests(lambda: manager.mark_computed(first, 70)) == 0
    assert digests(lambda: generate(first, 10)) == 0
    assert digests(lambda: generate(first, 1)) == 1  # says that the fifth block is computed
    assert digests(lambda: generate(first, 160)) == 10

    assert digests(lambda: manager.allocate(second)) == 4  # its own prompt's, to look them up
    assert manager.num_cached_tokens(second) == 64
    assert digests(lambda: generate(second, 8)) == 0


def use_of_memory(lengths):
    """Reserved slots that carry a token at the end: longest, next power of two, blocks of 16."""
    tokens, pool = sum(lengths), 2 * max(lengths)
    powers = {length: len(BuddyAllocator(pool).allocate(length)) for length in set(lengths)}
    return (
        tokens / (max(lengths) * len(lengths)),
        tokens / sum(powers[length] for length in lengths),
        tokens / sum(-(-length // 16) * 16 for length in lengths),
    )


def test_use_of_memory_on_the_trace():
    paths = [folder / "shared" / "traces" / TRACE for folder in (ROOT, ROOT.parent)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        pytest.skip(f"{TRACE} is not in shared/traces")
    longest, power_of_two, pages = use_of_memory(
        [request.prompt_len + request.output_len for request in read_trace(path)]
    )
    assert f"{longest:.1%} {power_of_two:.1%} {pages:.1%}" == "26.5% 72.3% 99.6%"
    assert f"{pages / power_of_two - 1:.0%} {pages / longest:.1f}" == "38% 3.8"
    for figure in ("26.5 %", "72.3 %", "99.6 %", "+38 %", "3.8 times"):
        assert figure in PAGE


def test_use_of_memory_with_the_built_in_lengths():
    lengths = [
        request.prompt_len + request.output_len for request in sample_requests(20_000, seed=0)
    ]
    longest, power_of_two, pages = use_of_memory(lengths)
    assert longest == pytest.approx(0.24, abs=0.03)
    assert power_of_two == pytest.approx(0.71, abs=0.01)
    assert pages == pytest.approx(0.996, abs=0.001)
    assert 0.3 < pages / power_of_two - 1 < 0.5 < pages / longest - 1


def test_short_texts_waste_more_than_four_percent():
    short = range(64, 193)
    completion = [r.prompt_len + r.output_len for r in sample_requests(20_000, seed=0)]
    assert f"{1 - use_of_memory(short)[2]:.1%}" == "5.5%"
    assert f"{1 - use_of_memory(completion)[2]:.1%}" == "0.4%"
