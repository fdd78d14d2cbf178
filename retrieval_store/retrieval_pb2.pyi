from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Context(_message.Message):
    __slots__ = ("tokens", "namespace", "max_nodes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    namespace: str
    max_nodes: int
    def __init__(self, tokens: _Optional[bytes] = ..., namespace: _Optional[str] = ..., max_nodes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("contexts",)
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[Context]
    def __init__(self, contexts: _Optional[_Iterable[_Union[Context, _Mapping]]] = ...) -> None: ...

class Subtree(_message.Message):
    __slots__ = ("tokens", "parents", "log_probs", "match_len")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    log_probs: bytes
    match_len: int
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., match_len: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("subtrees",)
    SUBTREES_FIELD_NUMBER: _ClassVar[int]
    subtrees: _containers.RepeatedCompositeFieldContainer[Subtree]
    def __init__(self, subtrees: _Optional[_Iterable[_Union[Subtree, _Mapping]]] = ...) -> None: ...

class LearnRequest(_message.Message):
    __slots__ = ("namespace", "tokens", "runs", "tokenizer_hash", "model_hash", "vocab_size")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    tokens: bytes
    runs: bytes
    tokenizer_hash: str
    model_hash: str
    vocab_size: int
    def __init__(self, namespace: _Optional[str] = ..., tokens: _Optional[bytes] = ..., runs: _Optional[bytes] = ..., tokenizer_hash: _Optional[str] = ..., model_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class LearnReply(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...
