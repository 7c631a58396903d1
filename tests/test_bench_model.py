"""`bench model` on a tiny random Llama; its vLLM side against a script that stands in for vLLM."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from bench import model, model_source, model_vllm
from bench.__main__ import main
from bench.model_first_token import first_token_records
from bench.model_runs import Ours, continuous_batching, matrix_products, padded
from bench.model_vllm import VllmProcess
from bench.records import BenchError
from bench.report import read_result

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def llama():
    return model_source.tiny_llama()


@pytest.fixture(scope="module")
def expected(llama):
    """Each prompt alone, by transformers."""
    return [padded(llama, [prompt], NEW_TOKENS)()[0] for prompt in PROMPTS]


def test_everyone_generates_the_same(llama, expected):
    assert padded(llama, PROMPTS, NEW_TOKENS)() == expected
    ours = Ours(llama, PROMPTS, NEW_TOKENS)
    assert ours() == expected == ours()
    assert [seconds > 0 for seconds in ours.bookkeeping] == [True, True]
    batching = continuous_batching(llama, PROMPTS, NEW_TOKENS)
    try:
        assert batching() == expected == batching()
    finally:
        llama.destroy_cached_continuous_batching_manager()
    assert model_source.check_tokens(llama, PROMPTS, expected, "all") == 0


def test_the_roof_has_all_products_of_the_model(llama):
    ours, counts = Ours(llama, PROMPTS, NEW_TOKENS), []
    handles = [
        layer.register_forward_hook(
            lambda layer, x, _: counts.append(x[0].numel() // x[0].shape[-1])
        )
        for layer in llama.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    matrix_products(llama, PROMPTS, NEW_TOKENS)()
    roof, counts[:] = sorted(counts), []
    ours()
    for handle in handles:
        handle.remove()
    assert sorted(counts) == roof


def test_a_rounding_difference_is_counted_and_a_wrong_token_refused(llama, expected, monkeypatch):
    wrong = [list(tokens) for tokens in expected]
    wrong[2][1] += 1
    with pytest.raises(BenchError, match="them: prompt 2, token 1 is not that of plain"):
        model_source.check_tokens(llama, PROMPTS, wrong, "them")
    monkeypatch.setitem(model_source.EXCUSED, "float32", 100.0)
    monkeypatch.setitem(model_source.MOST_EXCUSED, "float32", 1.0)
    assert model_source.check_tokens(llama, PROMPTS, wrong, "them") >= 1
    monkeypatch.setitem(model_source.MOST_EXCUSED, "float32", 0.0)
    with pytest.raises(BenchError, match="of 18 tokens are not the best by rounding"):
        model_source.check_tokens(llama, PROMPTS, wrong, "them")


def test_a_warm_first_token_comes_sooner(llama):
    records = first_token_records(llama, 512, "tiny", seed=0)
    assert [record["kind"] for record in records] == ["time", "time", "ratio"]
    assert 0 < records[-1]["value"] < 1


def test_prompts_have_the_lengths_that_are_named():
    prompts = model.random_prompts(model.FULL[0], 1000, 0)
    lengths = [len(prompt) for prompt in prompts]
    assert (len(lengths), lengths[0], lengths[-1]) == (16, 16, 200)
    assert lengths == sorted(lengths)
    assert (
        model.random_prompts(model.FULL[0], 1000, 0)
        == prompts
        != model.random_prompts(model.FULL[0], 1000, 1)
    )


def test_the_quick_command_runs_without_smollm2(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PAGED_SMOLLM2", str(tmp_path / "nothing"))
    small = model.QUICK[0]._replace(prompts=2, longest=20, new_tokens=2, shared=64)
    monkeypatch.setattr(model, "QUICK", (small,))
    assert main(["model", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tiny Llama, float32, 2 prompts of 16 to 20 tokens, 2 new: ours" in printed
    assert "vLLM: not measured" in printed
    result = read_result(tmp_path / "model-quick.json")
    assert {record["kind"] for record in result["records"]} == {"time", "ratio"}
    assert (tmp_path / "model-quick.png").stat().st_size > 10_000
    assert main(["model", "--out", str(tmp_path)]) == 3
    assert "bench model: not measured: SmolLM2" in capsys.readouterr().err


CHILD = """
import json, sys
job = json.loads(sys.stdin.readline())
print("loading", file=sys.stderr)
print(json.dumps({"ready": job["dtype"]}), flush=True)
for line in sys.stdin:
    if BREAK:
        sys.exit("no more memory")
    print(json.dumps({"tokens": [prompt[: job["max_tokens"]] for prompt in job["prompts"]]}), flush=True)
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    def use(breaks):
        path = tmp_path / "child.py"
        path.write_text(CHILD.replace("BREAK", str(breaks)))
        monkeypatch.setattr(model_vllm, "CHILD", path)
        return VllmProcess(Path(sys.executable), Path("m"), "float32", PROMPTS, 1, 1)

    return use


def test_another_process_runs_a_round_at_a_time(child):
    with child(False) as process:
        process.wait()
        assert process.version == "float32"
        assert process.generate() == process.generate() == [[5], [8], [9]]


def test_what_ends_another_process_is_told(child):
    with child(True) as process:
        process.wait()
        with pytest.raises(BenchError, match="vLLM ended with exit code 1: no more memory"):
            process.generate()


def test_the_child_speaks_as_the_parent_expects(tmp_path):
    """The real child, over a module that looks like vLLM."""
    (tmp_path / "vllm.py").write_text(
        "__version__ = '0'\n"
        "class SamplingParams:\n"
        "    def __init__(self, max_tokens, temperature, ignore_eos): self.n = max_tokens\n"
        "class LLM:\n"
        "    def __init__(self, model, **options): print(model, options)\n"
        "    def generate(self, prompts, params, use_tqdm):\n"
        "        class Output: pass\n"
        "        outputs = []\n"
        "        for prompt in prompts:\n"
        "            output = Output(); output.outputs = [Output()]\n"
        "            output.outputs[0].token_ids = prompt['prompt_token_ids'][:params.n]\n"
        "            outputs.append(output)\n"
        "        return outputs\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        process = VllmProcess(Path(sys.executable), Path("m"), "float32", PROMPTS, 2, 1)
    with process:
        process.wait()
        assert process.version == "0"
        assert process.generate() == [[5, 6], [8], [9, 10]]
