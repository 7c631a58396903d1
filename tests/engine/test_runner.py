"""Logits of ragged batches over pages, against eager attention of the same model.

The truth is the model in float64; what eager attention in the model's own dtype makes of it says
how much rounding is fair.
"""

import random

import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, WINDOW, tiny_model, transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from paged import CacheConfig, PagedError, Sequence, UnsupportedModelError
from paged.engine import ModelRunner

LENGTHS = (23, 5, 14)


def random_tokens(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def logits_alone(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def poisoned(runner):
    """Slots that nobody wrote hold NaN, so that reading one shows."""
    if runner.cache.dtype.is_floating_point and runner.cache.dtype.itemsize > 1:
        for plane in (*runner.cache.key, *runner.cache.value):
            plane.fill_(float("nan"))
    return runner


def shuffled(manager, seed=0):
    """Hand out every block once and take them back in random order: tables come out shuffled."""
    fillers = [
        Sequence(("filler", i), [0] * manager.config.block_size)
        for i in range(manager.gpu.num_blocks)
    ]
    for filler in fillers:
        manager.allocate(filler)
    random.Random(seed).shuffle(fillers)
    for filler in fillers:
        manager.free(filler)


def logits_over_pages(runner, token_lists, chunks=(0, 1, 1, 3, 5), num_decoded=4, seed=0):
    """Logits of every token: prompts in random chunks, then `num_decoded` tokens one by one."""
    rng = random.Random(seed)
    manager = runner.manager
    seqs = [Sequence(i, tokens[:-num_decoded]) for i, tokens in enumerate(token_lists)]
    for seq in seqs:
        manager.allocate(seq)
    logits = [[] for _ in seqs]
    done = [0] * len(seqs)
    while True:
        for seq, tokens, num in zip(seqs, token_lists, done, strict=True):
            if num == len(seq) < len(tokens):
                seq.append_token(tokens[num])
                runner.cache.copy_blocks(manager.append_slots(seq))
        left = [len(seq) - num for seq, num in zip(seqs, done, strict=True)]
        if not any(left):
            break
        lens = [min(rng.choice(chunks), num) for num in left]
        if not any(lens):
            continue
        active = [i for i, num in enumerate(lens) if num]
        rng.shuffle(active)
        batch = manager.build_batch(
            [seqs[i] for i in active],
            [lens[i] for i in active],
            context_lens=[done[i] for i in active],
        )
        places = [(i, p) for i in active for p in range(done[i], done[i] + lens[i])]
        out = runner.forward(
            [token_lists[i][p] for i, p in places],
            [p for _, p in places],
            batch,
            range(len(places)),
        )
        for (i, _), row in zip(places, out, strict=True):
            logits[i].append(row)
        for i in active:
            done[i] += lens[i]
            manager.mark_computed(seqs[i], done[i])
    return [torch.stack(rows) for rows in logits], seqs


def errors(model, exact_model, token_lists, got):
    """Largest errors of `got` and of the model's own attention, against the exact model."""
    ours = eager = 0.0
    for tokens, logits in zip(token_lists, got, strict=True):
        exact = logits_alone(exact_model, tokens)
        ours = max(ours, (logits - exact).abs().max().item())
        eager = max(eager, (logits_alone(model, tokens) - exact).abs().max().item())
    return ours, eager


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_chunks_and_decodes_give_the_logits_of_eager_attention(kind):
    model = tiny_model(kind)
    config = CacheConfig(block_size=4, num_gpu_blocks=24, enable_prefix_caching=False)
    runner = poisoned(ModelRunner(model, config))
    shuffled(runner.manager)
    token_lists = random_tokens()
    got, seqs = logits_over_pages(runner, token_lists)

    ours, eager = errors(model, tiny_model(kind, torch.float64), token_lists, got)
    assert ours <= 3 * eager
    table = runner.manager.block_table(seqs[0])
    every_layer_has_a_window = kind == "mistral"
    assert runner.cache_config.sliding_window == (WINDOW if every_layer_has_a_window else None)
    assert (-1 in table) == every_layer_has_a_window
    assert table != sorted(table)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_triton_kernels_give_the_same_logits(kind):
    model = tiny_model(kind)
    runner = poisoned(
        ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=8), backend="triton")
    )
    token_lists = random_tokens((11, 6))
    got, _ = logits_over_pages(runner, token_lists, chunks=(5,), num_decoded=2)
    ours, eager = errors(model, tiny_model(kind, torch.float64), token_lists, got)
    assert ours <= 3 * eager


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_eager_attention(kind, dtype):
    model = tiny_model(kind, dtype)
    runner = poisoned(ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=16)))
    assert runner.cache.dtype == dtype
    token_lists = random_tokens()
    got, _ = logits_over_pages(runner, token_lists)
    assert got[0].dtype == dtype
    ours, eager = errors(model, tiny_model(kind, torch.float64), token_lists, got)
    assert ours <= 3 * eager


def rounded(x, dtype):
    if dtype != torch.int8:
        return x.to(dtype).to(x.dtype)
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2], ids=str)
def test_a_quantised_cache_gives_the_logits_of_rounded_keys_and_values(dtype):
    def attention(module, query, key, value, *args, **kwargs):
        key, value = rounded(key, dtype), rounded(value, dtype)
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("rounded", attention)
    AttentionMaskInterface.register("rounded", eager_mask)
    model = tiny_model("llama")
    runner = ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=16), dtype=dtype)
    token_lists = random_tokens()
    got, _ = logits_over_pages(runner, token_lists)
    exact = tiny_model("llama", torch.float64, "rounded")
    ours, eager = errors(tiny_model("llama", attention="rounded"), exact, token_lists, got)
    assert ours <= 3 * eager
    assert errors(model, tiny_model("llama", torch.float64), token_lists, got)[0] > 1000 * eager


def test_any_rows_in_any_order():
    runner = ModelRunner(tiny_model("llama"), CacheConfig(block_size=4, num_gpu_blocks=8))
    seq = Sequence("a", random_tokens((7,))[0])
    runner.manager.allocate(seq)
    batch = runner.manager.build_batch([seq], [7])

    def forward(rows):
        return runner.forward(seq.token_ids, range(7), batch, rows)

    every = forward(range(7))
    assert every.shape == (7, VOCAB_SIZE)
    torch.testing.assert_close(forward(torch.tensor([6, 0, 6])), every[[6, 0, 6]])
    assert forward([]).shape == (0, VOCAB_SIZE)


def test_a_prefix_from_the_cache_is_read_as_it_was_written():
    model = tiny_model("qwen3")
    runner = poisoned(ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=16)))
    manager = runner.manager
    (tokens,) = random_tokens((13,))
    seqs = [Sequence(0, tokens), Sequence(1, tokens)]
    rows = []
    for seq in seqs:
        manager.allocate(seq)
        start = manager.num_cached_tokens(seq)
        batch = manager.build_batch([seq], [13 - start])
        rows.append(runner.forward(tokens[start:], range(start, 13), batch, range(13 - start)))
        manager.mark_computed(seq, 13)
    assert [len(logits) for logits in rows] == [13, 1]
    got = [torch.cat([rows[0][:-1], rows[1]])]
    ours, eager = errors(model, tiny_model("qwen3", torch.float64), [tokens], got)
    assert ours <= 3 * eager


def test_the_model_is_left_as_it_was():
    model = tiny_model("mistral", attention="sdpa")
    before = logits_alone(model, [3, 1, 4])
    runner = ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=8))
    seq = Sequence("a", [3, 1, 4])
    runner.manager.allocate(seq)
    batch = runner.manager.build_batch([seq], [3])
    runner.forward(seq.token_ids, range(3), batch, [2])
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        runner.forward([VOCAB_SIZE, 0, 0], range(3), batch, [2])
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits_alone(model, [3, 1, 4]), before)


def test_what_a_runner_tells_of_its_model():
    model = tiny_model("llama")
    runner = ModelRunner(model, CacheConfig(block_size=4, num_gpu_blocks=8, num_cpu_blocks=3))
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (
        VOCAB_SIZE,
        128,
        (2,),
    )
    assert runner.device == torch.device("cpu")
    assert runner.manager.config is runner.cache_config
    cache = runner.cache
    assert (cache.num_layers, cache.num_blocks, cache.num_cpu_blocks) == (2, 8, 3)
    assert (cache.num_kv_heads, cache.head_dim, cache.head_dim_v) == (2, 8, 8)
    assert repr(runner) == f"ModelRunner(LlamaForCausalLM, {cache!r})"


def test_layers_that_reuse_keys_and_values_take_no_memory():
    assert ModelRunner(tiny_model("gemma3n"), CacheConfig(num_gpu_blocks=1)).cache.num_layers == 2


def test_without_a_number_of_blocks_a_cpu_pool_has_a_fixed_size(monkeypatch):
    monkeypatch.setattr("paged.engine.runner.CPU_POOL_BYTES", 2**20)
    runner = ModelRunner(tiny_model("llama"))
    bytes_per_block = 2 * 2 * 16 * 2 * 8 * 4  # K and V, layers, slots, heads, head_dim, float32
    assert runner.cache.num_blocks == 2**20 // bytes_per_block
    assert runner.cache.nbytes <= 2**20


def test_longrope_ends_where_it_would_change_earlier_tokens():
    config = transformers.Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    runner = ModelRunner(transformers.Phi3ForCausalLM(config).eval(), CacheConfig(num_gpu_blocks=1))
    assert runner.max_model_len == 32


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}


def changed(kind, **changes):
    config = transformers.AutoConfig.for_model(**tiny_model(kind).config.to_dict() | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


UNSUPPORTED = {
    "encoder-decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
    ),
    "language model head": lambda: tiny_model("llama").model,
    "not K and V": lambda: transformers.RwkvForCausalLM(
        transformers.RwkvConfig(hidden_size=8, num_hidden_layers=2, vocab_size=9)
    ),
    "linear_attention": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **SMALL, num_key_value_heads=2, head_dim=8, num_experts=2, intermediate_size=8
        )
    ),
    "makes 0 calls": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=9)
    ),
    "makes 4 calls": lambda: transformers.DiffLlamaForCausalLM(
        transformers.DiffLlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=8)
    ),
    "no keywords": lambda: transformers.StableLmForCausalLM(
        transformers.StableLmConfig(**SMALL, num_key_value_heads=2, intermediate_size=8)
    ),
    "chunked_attention": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=8, num_local_experts=2
        )
    ),
    "bidirectional": lambda: changed("gemma3", use_bidirectional_attention=True),
    "own making": lambda: transformers.DogeForCausalLM(
        transformers.DogeConfig(**SMALL, num_key_value_heads=2, intermediate_size=8)
    ),
    "differ in": lambda: transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=16,
            intermediate_size=8,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(reason):
    model = UNSUPPORTED[reason]().eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelRunner(model, CacheConfig(num_gpu_blocks=1))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        ModelRunner(changed("llama").train(), CacheConfig(num_gpu_blocks=1))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model is Linear; it must be a transformers model"):
        ModelRunner(torch.nn.Linear(1, 1))


def test_a_window_that_is_not_the_models_is_refused():
    config = CacheConfig(num_gpu_blocks=1, sliding_window=WINDOW - 1)
    with pytest.raises(ValueError, match="sliding_window is 5; this model's is 6"):
        ModelRunner(tiny_model("mistral"), config)
    with pytest.raises(ValueError, match="sliding_window is 5; this model's is None"):
        ModelRunner(tiny_model("gemma2"), config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_cache_of_another_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="dtype"):
        ModelRunner(tiny_model("llama"), CacheConfig(num_gpu_blocks=1), dtype=dtype)


def test_tokens_that_are_not_the_batchs_are_refused():
    runner = ModelRunner(tiny_model("llama"), CacheConfig(block_size=4, num_gpu_blocks=8))
    seq = Sequence("a", [1, 2, 3])
    runner.manager.allocate(seq)
    batch = runner.manager.build_batch([seq], [3])
    with pytest.raises(ValueError, match=r"input_ids and positions have shapes \(2,\) and \(3,\)"):
        runner.forward([1, 2], range(3), batch, [0])


def test_calling_a_paged_model_without_pages_says_what_is_missing():
    model = changed("llama")
    model.set_attn_implementation("paged")
    with pytest.raises(PagedError, match="reads K and V from pages, and none came"):
        logits_alone(model, [1, 2, 3])


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config).eval()
    with pytest.raises(ValueError, match="the model is on device 'meta'"):
        ModelRunner(model)
