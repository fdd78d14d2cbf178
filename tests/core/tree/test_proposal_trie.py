"""Merging sequences by prefix."""

from draftline.core.tree.merge import ProposalTrie
from hypothesis import given
from hypothesis import strategies as st


def test_shared_prefixes_share_nodes_in_order_of_insertion() -> None:
    trie = ProposalTrie(10)
    assert trie.add([5, 6]) == 2
    assert trie.add([5, 7, 8]) == 2
    assert trie.add([5, 6]) == 0
    proposal = trie.proposal("x")
    assert proposal.source == "x"
    assert proposal.tokens.tolist() == [5, 6, 7, 8]
    assert proposal.parents.tolist() == [-1, 0, 0, 2]


def test_a_full_trie_takes_prefixes_only() -> None:
    trie = ProposalTrie(2)
    assert trie.add([1, 2, 3]) == 2
    assert trie.is_full
    assert trie.add([1, 2]) == 0
    assert trie.add([4]) == 0
    assert trie.proposal("x").tokens.tolist() == [1, 2]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8), st.integers(0, 12))
def test_its_paths_are_the_prefixes_of_the_sequences(
    sequences: list[list[int]], max_nodes: int
) -> None:
    trie = ProposalTrie(max_nodes)
    for sequence in sequences:
        trie.add(sequence)
    proposal = trie.proposal("x")
    proposal.check(vocab_size=4)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    prefixes = {
        tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))
    }
    assert len(set(paths)) == len(paths) == min(max_nodes, len(prefixes))
    assert set(paths) <= prefixes
