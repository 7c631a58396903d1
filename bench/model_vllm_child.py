"""Generates with vLLM's CPU build, run by its own Python: a round for each line on stdin.

stdin's first line is JSON: model, dtype, prompts (token ids), max_tokens, max_model_len. Replies go
to stdout, a JSON line each: {"ready": vLLM's version}, then {"tokens": [[...], ...]} for a round.
What vLLM prints goes to stderr.
"""

import json
import os
import sys


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    job = json.loads(sys.stdin.readline())
    import vllm  # type: ignore[import-not-found]

    model = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,
    )
    params = vllm.SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    reply(ready=vllm.__version__)
    for _ in sys.stdin:
        outputs = model.generate(prompts, params, use_tqdm=False)
        reply(tokens=[list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    main()
