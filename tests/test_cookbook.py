"""The cookbook: short recipes (test_docs.py runs them), and an engine that says what dense says."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from paged_kernels import dense_attention

DOCS = Path(__file__).parents[1] / "docs"
COOKBOOK = (DOCS / "cookbook.md").read_text()
ENGINE = DOCS / "tiny_engine.py"


@pytest.fixture(scope="module")
def engine_file():
    return runpy.run_path(str(ENGINE))


def test_recipes_are_short():
    recipes = re.findall(r"```python\n(.*?)```", COOKBOOK, re.DOTALL)
    assert len(recipes) == 5
    assert max(len(recipe.splitlines()) for recipe in recipes) <= 25
    assert len(ENGINE.read_text().splitlines()) <= 100


def decode_densely(model, tokens, max_tokens):
    """Greedy decoding without a cache: everything is computed again for each token."""
    for _ in range(max_tokens):
        ends = torch.tensor([0, len(tokens)])

        def attend(layer, query, key, value, ends=ends):
            return dense_attention(query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends)

        logits = model.logits(tokens, list(range(len(tokens))), attend)
        tokens = [*tokens, int(logits[-1].argmax())]
    return tokens


@pytest.mark.parametrize(
    ("num_gpu_blocks", "num_cpu_blocks", "preempted"),
    [(200, 0, set()), (18, 0, {"recompute"}), (20, 8, {"recompute", "swap"})],
    ids=["roomy", "recompute", "both kinds"],
)
def test_the_tiny_engine_says_what_dense_decoding_says(
    engine_file, num_gpu_blocks, num_cpu_blocks, preempted
):
    model = engine_file["TinyModel"](seed=1)
    engine = engine_file["TinyEngine"](model, num_gpu_blocks, num_cpu_blocks)
    start = [3, 1, 4, 1, 5]  # shared: the first block of each prompt
    prompts = {n: [*start, *((31 * n + 7 * i) % 97 for i in range(5 * n))] for n in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=16)
    for _ in range(500):
        if not engine.scheduler.has_unfinished:
            break
        engine.step()
        engine.manager.check_invariants()
    generated = {name: sequence.token_ids for name, (sequence, _) in engine.requests.items()}
    assert generated == {n: decode_densely(model, p, 16) for n, p in prompts.items()}
    assert len({tuple(tokens[-16:]) for tokens in generated.values()}) == len(prompts)
    assert {kind for kind, count in engine.scheduler.num_preemptions.items() if count} == preempted
    assert engine.manager.stats().prefix_hit_tokens > 0
    assert engine.manager.stats().gpu.num_used == 0


def test_the_tiny_engine_runs_as_the_cookbook_says(capsys):
    runpy.run_path(str(ENGINE), run_name="__main__")
    *lines, preempted = capsys.readouterr().out.splitlines()
    assert [line.split(" ->")[0].strip() for line in lines] == [
        f"{length} tokens" for length in range(5, 30, 4)
    ]
    assert preempted.startswith("preempted: {'swap': ")
