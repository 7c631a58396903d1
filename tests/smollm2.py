"""SmolLM2-135M-Instruct, 24 prompts, and what plain transformers makes of each."""

from dataclasses import dataclass
from functools import cache

import torch
from fetch_smollm2 import folder
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

NUM_TOKENS = 48
SYSTEM = (
    "<|im_start|>system\nYou are a careful assistant of a small library in a harbour town. You "
    "answer in plain sentences, you never invent a title, and you say so when you do not "
    "know.<|im_end|>\n<|im_start|>user\n"
)
QUESTIONS = [
    "What is paged attention?",
    "Write a short poem about rain over the harbour.",
    "How many legs do three spiders and two dogs have together?",
    "Who wrote about the white whale, and what was the ship called?",
    "Give me a recipe for pancakes with four ingredients.",
    "Translate 'good morning' into French, German and Spanish.",
    "Is seventeen a prime number?",
    "Explain to a child why the sky is blue, in three sentences.",
    "List the planets from the sun outwards.",
    "What does the word 'ephemeral' mean?",
    "Name two rivers that flow through Vienna and Budapest.",
    "How do I sort a list of pairs by the second entry in Python?",
]
BEGINNINGS = [
    "Hello",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you because of these. " + "\n".join(QUESTIONS[::-1] * 2),
    "The three laws of thermodynamics are as follows.\n1.",
    "Water boils at a lower temperature on a mountain, since",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n",
    "Here are my questions. " + " ".join(QUESTIONS),
    "In 1969, people watched on television as two astronauts",
    "A matrix is called symmetric when it equals its own transpose, and orthogonal when its inverse "
    "does. The eigenvalues of a real symmetric matrix are real, and its eigenvectors can be chosen "
    "orthogonal to each other; this is the content of the",
]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one prompt; how far the best logit of each lay above the second best."""

    token_ids: list[int]
    gaps: list[float]


@cache
def model():
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32).eval()


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(folder())


@cache
def prompts():
    """Token ids: 12 questions after the same system prompt, and 12 texts to go on with."""
    asked = [f"{SYSTEM}{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [tokenizer().encode(text) for text in (*asked, *BEGINNINGS)]


def reference(place, draft):
    """What plain transformers makes of a prompt.

    draft: tokens that may well be right. As in speculative decoding they save time where they are,
    and change nothing where they are not.
    """
    if place not in _references:
        _references[place] = _greedy(prompts()[place], draft)
    return _references[place]


_references = {}


@torch.inference_mode()
def _greedy(prompt, draft):
    """The most probable token, one after the other, from one prompt with its own cache."""
    past = DynamicCache(config=model().config)
    token_ids, gaps = [], []
    while len(token_ids) < NUM_TOKENS:
        known = len(token_ids)
        guess = draft[known : NUM_TOKENS - 1] if draft[:known] == token_ids else []
        new = torch.tensor([(token_ids[-1:] or prompt) + guess])
        best = model()(new, cache=past, logits_to_keep=len(guess) + 1).logits[0].topk(2)
        for token, (first, second), guessed in zip(
            best.indices[:, 0].tolist(), best.values.tolist(), [*guess, None], strict=True
        ):
            token_ids.append(token)
            gaps.append(first - second)
            if token != guessed:
                break
        wrong = known + len(guess) + 1 - len(token_ids)
        if wrong:
            past.crop(-wrong)
    return Reference(token_ids, gaps)
