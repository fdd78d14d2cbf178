"""Corpus, refinement, trie segments, segment stores and lookups."""
