"""Continuous batching of transformers models over paged K and V. Needs the extra `models`."""
