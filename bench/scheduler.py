"""Process time of a scheduler's step: `python -m bench.scheduler [--repeats N] [--json FILE]`.

256 sequences decode, of 20 to 2,000 tokens. Every step appends a token to each, and now and then
one ends and another comes, so that blocks are taken and given back. Each step is timed on its own;
the kinds of load take turns, so that a slow moment of the machine hits all of them.
"""
