"""An engine in 100 lines: continuous batching of a small transformer over paged K and V.

Run from the top of the repository: python docs/tiny_engine.py
"""

import paged_kernels
import torch
from torch.nn.functional import rms_norm, silu

import paged

VOCABULARY, LAYERS, HEADS, KV_HEADS, WIDTH = 97, 3, 4, 2, 16
HIDDEN = HEADS * WIDTH


class TinyModel:
    """A decoder with random weights. How its tokens attend is left to the caller."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        shapes = [(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH), (HIDDEN, HIDDEN)]  # q, k, v; output
        shapes += [(HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]  # up; down
        self.layers = [[torch.randn(s) * s[0] ** -0.5 for s in shapes] for _ in range(LAYERS)]
        self.embedding, self.head = torch.randn(2, VOCABULARY, HIDDEN)

    def logits(self, tokens, positions, attend):
        """[num_tokens, VOCABULARY]; `attend(layer, query, key, value)` returns query's shape."""
        x, positions = self.embedding[tokens], torch.tensor(positions)
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            heads = (rms_norm(x, (HIDDEN,)) @ qkv).unflatten(1, (-1, WIDTH))
            query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            attended = attend(layer, rotate(query, positions), rotate(key, positions), value)
            x = x + attended.flatten(1) @ out
            x = x + silu(rms_norm(x, (HIDDEN,)) @ up) @ down
        return rms_norm(x, (HIDDEN,)) @ self.head.T


def rotate(x, positions):
    """Rotary positions: pairs of numbers turned by angles that grow with the position."""
    angles = positions[:, None, None] * 1000.0 ** -torch.linspace(0, 1, WIDTH // 2)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)).flatten(-2)


class TinyEngine:
    """Greedy decoding of many requests at once."""

    def __init__(self, model, num_gpu_blocks, num_cpu_blocks, block_size=4):
        config = paged.CacheConfig(block_size, num_gpu_blocks, num_cpu_blocks, watermark=0.0)
        self.model, self.manager = model, paged.BlockSpaceManager(config)
        settings = paged.SchedulerConfig(max_num_batched_tokens=32)
        self.scheduler = paged.Scheduler(settings, self.manager)
        sizes = (LAYERS, num_gpu_blocks, block_size, KV_HEADS, WIDTH)
        options = {"num_cpu_blocks": num_cpu_blocks, "dtype": torch.float32, "device": "cpu"}
        self.cache = paged_kernels.KVCache(*sizes, **options)
        self.requests = {}  # name -> its sequence, and its length when it is complete

    def add(self, name, prompt, max_tokens):
        sequence = paged.Sequence(name, prompt)
        self.requests[name] = sequence, len(prompt) + max_tokens
        self.scheduler.add(paged.SequenceGroup(name, [sequence]))

    def step(self):
        work = self.scheduler.schedule()
        self.cache.swap_out(work.swap_out)
        self.cache.swap_in(work.swap_in)
        self.cache.copy_blocks(work.copies)
        lens = {"query_lens": work.query_lens, "context_lens": work.context_lens}
        batch = self.manager.build_batch(work.seqs, **lens)
        rows = list(zip(work.seqs, *lens.values(), strict=True))
        tokens = [token for seq, q, c in rows for token in seq.token_ids[c : c + q]]
        positions = [position for _, q, c in rows for position in range(c, c + q)]

        def attend(layer, query, key, value):
            self.cache.write(layer, key, value, batch)
            return self.cache.attend(layer, query, batch)

        logits = self.model.logits(tokens, positions, attend)
        best = logits[batch.cu_seqlens_q[1:] - 1].argmax(dim=-1).tolist()
        names = [sequence.seq_id for sequence in work.seqs]
        choices = zip(names, best, work.reaches_end, strict=True)
        chosen = {name: token for name, token, is_last in choices if is_last}
        is_done = {name: len(seq) + 1 == end for name, (seq, end) in self.requests.items()}
        self.scheduler.update(work, chosen, finished=[name for name in chosen if is_done[name]])


if __name__ == "__main__":
    engine = TinyEngine(TinyModel(seed=0), num_gpu_blocks=20, num_cpu_blocks=8)
    for length in range(5, 30, 4):
        engine.add(f"{length} tokens", range(length), max_tokens=20)
    while engine.scheduler.has_unfinished:
        engine.step()
    for name, (sequence, _) in engine.requests.items():
        print(f"{name:>9} -> {sequence.token_ids[-20:]}")
    print("preempted:", engine.scheduler.num_preemptions)
