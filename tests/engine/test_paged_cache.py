"""`generate` over pages, against `generate` with the cache that transformers takes by default."""

import gc
import weakref

import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, tiny_model

from paged import CacheConfig, NoFreeBlocksError, PagedError, UnsupportedModelError
from paged.engine import PagedCache

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def batch(*paddings, length=9):
    """Random prompts, padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB_SIZE, (len(paddings), length))
    mask = torch.arange(length) >= torch.tensor(paddings)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def paged_cache(model, num_blocks=64, **options):
    """A pool whose slots hold NaN until they are written."""
    cache = PagedCache(model, CacheConfig(block_size=4, num_gpu_blocks=num_blocks), **options)
    for plane in (*cache.runner.cache.key, *cache.runner.cache.value):
        plane.fill_(float("nan"))
    return cache


def generate(model, inputs, **options):
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 12} | options)


def num_used(cache):
    cache.manager.check_invariants()
    return cache.manager.stats().gpu.num_used


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_default_cache(kind, mode):
    model, inputs = tiny_model(kind), batch(4, 0, 1)
    cache = paged_cache(model)
    got = generate(model, inputs, cache=cache, **MODES[mode])
    assert torch.equal(got, generate(model, inputs, **MODES[mode]))
    assert num_used(cache) > 0
    cache.reset()
    assert num_used(cache) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "triton", "max_new_tokens": 2},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["triton", "prefill in chunks", "prompt lookup"],
)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_other_ways_to_generate(kind, options):
    model, inputs, options = tiny_model(kind), batch(0), dict(options)
    cache = paged_cache(model, **{k: options.pop(k) for k in ("backend",) if k in options})
    got = generate(model, inputs, cache=cache, **options)
    assert torch.equal(got, generate(model, inputs, **options))
    num_used(cache)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_an_assistant_model_whose_tokens_are_cropped(kind):
    model, assistant = tiny_model(kind), tiny_model("qwen3")
    cache = paged_cache(model)
    got = generate(model, batch(0), cache=cache, assistant_model=assistant)
    assert torch.equal(got, generate(model, batch(0)))


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_padding_on_either_side_changes_no_logits(kind):
    model, exact = tiny_model(kind), tiny_model(kind, torch.float64)
    ids = torch.randint(3, VOCAB_SIZE, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 7:] = 0
    cache = paged_cache(model)
    logits = model(ids, attention_mask=mask, position_ids=positions_of(mask), cache=cache).logits
    for row in range(3):
        kept = mask[row].bool()
        alone = ids[row, kept][None]
        truth = exact(alone).logits[0]
        rounding = (model(alone).logits[0] - truth).abs().max()
        assert (logits[row, kept] - truth).abs().max() <= 3 * rounding
    assert num_used(cache) == 2 + 2 + 3  # 5, 7 and 9 tokens in blocks of 4


def test_no_padding_is_stored_and_finished_windows_give_blocks_back():
    inputs = batch(8, 0)
    for kind, expected in (("llama", 4 + 6), ("mistral", 2 + 2)):  # windows of 6
        cache = paged_cache(tiny_model(kind))
        generate(tiny_model(kind), inputs, cache=cache, max_new_tokens=16, min_new_tokens=16)
        assert cache.get_seq_length() == 9 + 15
        assert num_used(cache) == expected


def test_beams_share_the_blocks_of_what_they_have_in_common():
    model, inputs = tiny_model("llama"), batch(0, length=40)
    cache = paged_cache(model)
    generate(model, inputs, cache=cache, num_beams=4, max_new_tokens=3)
    assert num_used(cache) <= 10 + 4 * 1  # apart: 4 * 11


def test_a_conversation_goes_on_in_the_same_cache():
    model, inputs = tiny_model("gemma2"), batch(3, 0)
    cache = paged_cache(model)
    for _ in range(2):
        tokens = generate(model, inputs, cache=cache, eos_token_id=None)
        assert torch.equal(tokens, generate(model, inputs, eos_token_id=None))
        more = torch.tensor([[5, 6, 7]] * 2)
        ids = torch.cat([tokens, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12 + 3, dtype=torch.long)], 1)
        inputs = {"input_ids": ids, "attention_mask": mask}


def test_a_cache_serves_one_batch_after_another():
    model = tiny_model("llama")
    cache = paged_cache(model, num_blocks=12)
    for paddings in ((4, 0), (0,)):
        cache.reset()
        got = generate(model, batch(*paddings), cache=cache)
        assert torch.equal(got, generate(model, batch(*paddings)))


@torch.no_grad()
def test_rows_can_be_repeated_and_chosen():
    model = tiny_model("llama")
    cache, usual = paged_cache(model), model(**batch(0, 0)).cache
    model(**batch(0, 0), cache=cache)
    for each in (cache, usual):
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([3, 0, 1, 3]))
        each.crop(-1)
    cache.crop(7)
    usual.crop(-1)
    assert (cache.batch_size, cache.get_seq_length()) == (4, 7)
    assert num_used(cache) == 4  # two prompts of 7 tokens
    ids = torch.tensor([[3], [4], [5], [6]])
    got, expected = (model(ids, cache=each).logits for each in (cache, usual))
    torch.testing.assert_close(got, expected)
    assert num_used(cache) == 2 + 4  # the shared tails were copied, but for their last owners


@torch.no_grad()
def test_a_full_pool_leaves_the_cache_as_it_was():
    model = tiny_model("llama")
    cache = paged_cache(model, num_blocks=4)
    with pytest.raises(NoFreeBlocksError):
        model(**batch(0, 0), cache=cache)
    assert (num_used(cache), cache.get_seq_length()) == (0, 0)
    model(**batch(0), cache=cache)
    used, length = num_used(cache), cache.get_seq_length()
    with pytest.raises(NoFreeBlocksError):
        model(torch.full((1, 8), 3), cache=cache)
    assert (num_used(cache), cache.get_seq_length()) == (used, length) == (3, 9)
    assert model.config._attn_implementation == "eager"
    got = model(torch.tensor([[5]]), cache=cache).logits
    expected = model(torch.tensor([[5]]), cache=model(**batch(0)).cache).logits
    torch.testing.assert_close(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("row", [0, 2], ids=["copied", "not copied"])
def test_a_pool_that_is_full_when_shared_blocks_are_written(row):
    model, inputs = tiny_model("llama"), batch(0, length=6)
    cache = paged_cache(model, num_blocks=3)
    model(**inputs, cache=cache)
    cache.batch_repeat_interleave(3)
    with pytest.raises(NoFreeBlocksError):  # after the first row got its copy
        model(torch.tensor([[3], [4], [5]]), cache=cache)
    assert cache.get_seq_length() == 6
    cache.batch_select_indices(torch.tensor([row]))
    assert num_used(cache) == 2
    got = model(torch.tensor([[7]]), cache=cache).logits
    torch.testing.assert_close(got, model(torch.tensor([[7]]), cache=model(**inputs).cache).logits)


@torch.no_grad()
def test_a_failed_forward_pass_leaves_the_cache_as_it_was():
    model = tiny_model("llama")
    cache = paged_cache(model)
    with pytest.raises(IndexError):
        model(**batch(0, 0), cache=cache, logits_to_keep=torch.tensor([9]))
    assert (num_used(cache), cache.get_seq_length()) == (0, 0)
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
def test_an_interrupted_forward_pass_leaves_the_model_as_it_was():
    model, inputs = tiny_model("llama"), batch(2, 0)
    cache, before = paged_cache(model), generate(model, inputs)

    def interrupt(*_):
        raise KeyboardInterrupt  # torch calls no hook after one

    hook = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, cache=cache)
    hook.remove()
    assert torch.equal(generate(model, inputs), before)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(PagedError, match=r"was interrupted; reset\(\) it first"):
        model(torch.tensor([[3]] * 2), cache=cache)
    cache.reset()
    assert torch.equal(generate(model, inputs, cache=cache), before)
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
def test_what_does_not_fit_the_cache_is_refused():
    model = tiny_model("llama")
    cache = paged_cache(model)
    model(**batch(0, 0), cache=cache)
    with pytest.raises(ValueError, match=r"the batch has 3 rows, this cache holds 2; reset\(\)"):
        model(torch.tensor([[3]] * 3), cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 3\); it must cover the 9"):
        model(torch.tensor([[3]] * 2), cache=cache, attention_mask=torch.ones(2, 3))
    with pytest.raises(UnsupportedModelError, match="LlamaAttention got a 4-D attention mask"):
        model(torch.tensor([[3]] * 2), cache=cache, attention_mask=torch.ones(2, 1, 1, 10))
    for number in (-10, 10):
        with pytest.raises(ValueError, match=f"tokens_to_remove is {number}; the cache holds 9"):
            cache.crop(number)
    assert cache.get_seq_length() == 9


def test_another_prompt_for_a_cache_in_use_is_refused():
    model = tiny_model("llama")
    cache = paged_cache(model)
    generate(model, batch(0), cache=cache)
    with pytest.raises(ValueError, match=r"no new token after the 20 .* reset\(\) it first"):
        generate(model, batch(0), cache=cache)
    assert (cache.get_seq_length(), cache._forward) == (20, None)


def test_what_a_cache_is_made_of_is_checked():
    with pytest.raises(TypeError, match="cache_config is 3; it must be a CacheConfig or None"):
        PagedCache(tiny_model("llama"), 3)
    with pytest.raises(ValueError, match=r"backend must be None or one of .*, got 'x'"):
        paged_cache(tiny_model("llama"), backend="x")


@torch.no_grad()
def test_another_model_is_refused():
    cache = paged_cache(tiny_model("llama"))
    paged_cache(tiny_model("qwen3"))
    with pytest.raises(PagedError, match="made for another Qwen3ForCausalLM"):
        tiny_model("qwen3")(**batch(0), cache=cache)
    with pytest.raises(PagedError, match="in calls of the LlamaForCausalLM it was made for"):
        tiny_model("llama").model(**batch(0), cache=cache)
    assert num_used(cache) == 0


def test_the_model_attends_as_before_without_the_cache():
    model = tiny_model("llama", attention="sdpa")
    before = generate(model, batch(2, 0))
    generate(model, batch(2, 0), cache=paged_cache(model))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, batch(2, 0)), before)


def test_the_older_name_of_the_argument_works():
    model, cache = tiny_model("llama"), paged_cache(tiny_model("llama"))
    with pytest.warns(FutureWarning, match="past_key_values"):
        got = generate(model, batch(0), past_key_values=cache)
    assert num_used(cache) > 0
    assert torch.equal(got, generate(model, batch(0)))


def test_what_a_cache_tells():
    cache = paged_cache(tiny_model("gemma3n"), num_blocks=8)
    assert (len(cache), cache.batch_size, cache.get_seq_length()) == (4, -1, 0)
    assert (cache.get_max_length(), cache.get_mask_sizes(3, 0)) == (32, (3, 0))
    assert (cache.is_initialized, cache.is_compileable, cache.is_croppable) == (False, False, True)
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * 4
    assert repr(cache) == f"PagedCache(0 rows of 0 tokens, {cache.runner.cache!r})"


def test_nothing_keeps_a_cache_alive():
    cache = paged_cache(tiny_model("llama"))
    generate(tiny_model("llama"), batch(0), cache=cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
