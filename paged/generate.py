"""`python -m paged generate`: text from a transformers model whose K and V lie in pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .advice import flags_line
from .config import CacheConfig, block_bytes, check_threads
from .errors import PagedError, PromptTooLongError
from .scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from .engine import Engine, RequestOutput, SamplingParams

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", help="a folder, or a name on the Hugging Face hub")
    add("--gguf", metavar="FILE", help="a GGUF file, on disk or in the model's folder")
    add("--prompt", action="append", metavar="TEXT", default=[], help="may be given several times")
    add("--prompts", type=Path, metavar="FILE", help="prompts, one per line")
    add("--chat", action="store_true", help="prompts are messages: apply the model's chat template")

    def number(flag: str, default: int | None, text: str) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        add(flag, type=int, metavar="N", default=default, help=text + shown)

    number("--max-tokens", 128, "most tokens to generate for a prompt")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most probable token (default: %(default)s)",
    )
    number("--top-k", None, "draw among the k most probable tokens")
    add("--top-p", type=float, metavar="P", help="draw among those that make up this probability")
    number("--seed", None, "of the draws (default: another one each time)")
    number("--n", 1, "texts per prompt")
    number("--beams", 1, "beams of a beam search; 1 is none")

    cache, limits = CacheConfig(), SchedulerConfig()
    number("--num-blocks", None, "blocks in the pool (default: what fits; 1 GiB on a CPU)")
    number("--block-size", cache.block_size, "tokens per block")
    number("--num-cpu-blocks", cache.num_cpu_blocks, "blocks to move preempted requests to")
    add("--no-prefix-cache", action="store_true", help="share no blocks between equal prefixes")
    number("--max-num-seqs", limits.max_num_seqs, "sequences running at once")
    number("--max-num-batched-tokens", limits.max_num_batched_tokens, "tokens per step")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the model and the cache (default: as it was saved)",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    number("--threads", None, "of torch on the CPU (default: its own choice)")


def run(args: argparse.Namespace) -> int:
    """Generate, print texts, summary and advice; 1 when a prompt could not be finished."""
    prompts = _read_prompts(args)
    cache_config = CacheConfig(
        block_size=args.block_size,
        num_gpu_blocks=args.num_blocks,
        num_cpu_blocks=args.num_cpu_blocks,
        enable_prefix_caching=not args.no_prefix_cache,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
    )
    check_threads(args.threads, optional=True)

    _require_transformers()
    import torch

    from .engine import Engine, SamplingParams, pack_linear_layers
    from .engine.loading import load_model

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        n=args.n,
        num_beams=args.beams,
    )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, gguf=args.gguf, dtype=args.dtype, device=args.device)
    pack_linear_layers(model)  # nobody else has it
    engine = Engine(
        model, tokenizer=tokenizer, cache_config=cache_config, scheduler_config=scheduler_config
    )
    for number, prompt in enumerate(prompts, 1):
        _add(engine, number, _token_ids(tokenizer, prompt, args.chat), params)

    start = perf_counter()
    printer = _Printer(prompts, args.chat, streams=len(prompts) == args.n == args.beams == 1)
    while engine.has_unfinished:
        for output in engine.step():
            printer.show(output)
    print(summary(engine, perf_counter() - start))
    advice = engine.advice()
    for sentence in advice:
        print(f"advice: {sentence}")
    if flags := flags_line(advice):
        print(flags)
    return FAILED if printer.any_failed else 0


class _Printer:
    """One prompt's text as it comes; of several prompts or texts each when it is complete."""

    def __init__(self, prompts: list[str], is_chat: bool, streams: bool) -> None:
        self.any_failed = False
        self._prompts = prompts
        self._is_chat = is_chat
        self._streams = streams
        if streams and not is_chat:
            print(prompts[0], end="", flush=True)

    def show(self, output: RequestOutput) -> None:
        number = output.request_id
        assert isinstance(number, int)
        if self._streams:
            print(output.outputs[0].new_text, end="\n\n" if output.finished else "", flush=True)
        elif output.finished:
            prompt = self._prompts[number - 1]
            for one in output.outputs:
                label = f"{number}.{one.index + 1}" if len(output.outputs) > 1 else str(number)
                text = f"{prompt}\n{one.text}" if self._is_chat else prompt + one.text
                print(f"[{label}] {text}\n", flush=True)
        if output.error:
            self.any_failed = True
            print(f"paged: prompt {number} could not be finished: {output.error}", file=sys.stderr)


def summary(engine: Engine, seconds: float) -> str:
    """What was done, and what the pool had to do for it."""
    tally, scheduler, manager = engine.tally, engine.scheduler, engine.manager
    config, cache = manager.config, engine.runner.cache
    per_block = block_bytes(
        cache.block_size,
        cache.num_kv_heads,
        cache.head_dim,
        cache.dtype,
        cache.num_layers,
        cache.head_dim_v,
    )
    generated, prompt_tokens = scheduler.num_generated_tokens, scheduler.num_prompt_tokens
    preemptions = scheduler.num_preemptions
    lines = [
        ("requests", f"{tally.requests:,}", f"{tally.steps:,} steps in {seconds:.1f} s"),
        (
            "prompt tokens",
            f"{prompt_tokens:,}",
            f"{tally.cached_tokens:,} of them found in the prefix cache",
        ),
        ("generated tokens", f"{generated:,}", f"{generated / seconds:,.1f} per second"),
        (
            "blocks",
            f"{tally.peak_blocks:,}",
            f"at most, of {cache.num_blocks:,} with {config.block_size} tokens and "
            f"{per_block / 2**10:,.0f} KiB each",
        ),
        (
            "preemptions",
            f"{sum(preemptions.values()):,}",
            f"{preemptions['swap']:,} by moving blocks to the CPU pool, "
            f"{preemptions['recompute']:,} by computing again "
            f"({scheduler.recomputed_tokens:,} tokens)",
        ),
    ]
    return "\n".join(f"{name:<18}{figure:>10}   {remark}" for name, figure, remark in lines)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts {args.prompts} is no text in UTF-8: {error}") from error
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT, or --prompts FILE with one in each line")
    return prompts


def _token_ids(tokenizer: Any, prompt: str, is_chat: bool) -> list[int]:
    """The tokens of a prompt, or of a conversation that has only this message."""
    if not is_chat:
        return list(tokenizer.encode(prompt))
    if tokenizer.chat_template is None:
        raise ValueError("--chat: this model has no chat template")
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _add(engine: Engine, number: int, token_ids: list[int], params: SamplingParams) -> None:
    if not token_ids:
        raise ValueError(f"prompt {number} is empty; --prompt must be a text of at least one token")
    try:
        engine.add_request(token_ids, params, request_id=number)
    except PromptTooLongError as error:
        raise PromptTooLongError(f"prompt {number}: {error}") from error


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise PagedError("generate needs transformers: pip install 'paged[models]'") from error
