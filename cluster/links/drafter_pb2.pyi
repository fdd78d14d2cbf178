from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FeatureLayers(_message.Message):
    __slots__ = ("layers", "width")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "name", "features")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    features: FeatureLayers
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., features: _Optional[_Union[FeatureLayers, _Mapping]] = ...) -> None: ...

class LogitsParams(_message.Message):
    __slots__ = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    def __init__(self, top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_len", "temperature", "seed", "namespace", "logits_params", "end_ids", "cache_salt", "store")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PARAMS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: Array
    prompt_len: int
    temperature: float
    seed: int
    namespace: str
    logits_params: LogitsParams
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    store: bool
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Union[Array, _Mapping]] = ..., prompt_len: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., namespace: _Optional[str] = ..., logits_params: _Optional[_Union[LogitsParams, _Mapping]] = ..., end_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., store: _Optional[bool] = ...) -> None: ...

class TopNextTokens(_message.Message):
    __slots__ = ("tokens", "ids")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    tokens: Array
    ids: Array
    def __init__(self, tokens: _Optional[_Union[Array, _Mapping]] = ..., ids: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "base_len", "tokens", "probe_ids", "top_next_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    tokens: Array
    probe_ids: Array
    top_next_tokens: TopNextTokens
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Union[Array, _Mapping]] = ..., probe_ids: _Optional[_Union[Array, _Mapping]] = ..., top_next_tokens: _Optional[_Union[TopNextTokens, _Mapping]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("request_id", "position", "values")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    values: Array
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., values: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("request_id", "committed_len", "max_nodes", "assumed", "step_s", "token_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    committed_len: int
    max_nodes: int
    assumed: Array
    step_s: float
    token_s: float
    def __init__(self, request_id: _Optional[str] = ..., committed_len: _Optional[int] = ..., max_nodes: _Optional[int] = ..., assumed: _Optional[_Union[Array, _Mapping]] = ..., step_s: _Optional[float] = ..., token_s: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("sequence", "closes", "opens", "commits", "queries", "budget_s", "last_commits", "features")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    closes: _containers.RepeatedScalarFieldContainer[str]
    opens: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    budget_s: float
    last_commits: _containers.RepeatedCompositeFieldContainer[Commit]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, sequence: _Optional[int] = ..., closes: _Optional[_Iterable[str]] = ..., opens: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., budget_s: _Optional[float] = ..., last_commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class MoreFeatures(_message.Message):
    __slots__ = ("features",)
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("tokens", "offsets", "mask", "wanted", "top_k")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    tokens: Array
    offsets: Array
    mask: Array
    wanted: Array
    top_k: int
    def __init__(self, tokens: _Optional[_Union[Array, _Mapping]] = ..., offsets: _Optional[_Union[Array, _Mapping]] = ..., mask: _Optional[_Union[Array, _Mapping]] = ..., wanted: _Optional[_Union[Array, _Mapping]] = ..., top_k: _Optional[int] = ...) -> None: ...

class Distributions(_message.Message):
    __slots__ = ("ids", "probs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    ids: Array
    probs: Array
    def __init__(self, ids: _Optional[_Union[Array, _Mapping]] = ..., probs: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("request_id", "tokens", "parents", "log_probs", "probe", "num_top_next_tokens", "distributions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: Array
    parents: Array
    log_probs: Array
    probe: Probe
    num_top_next_tokens: int
    distributions: Distributions
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Union[Array, _Mapping]] = ..., parents: _Optional[_Union[Array, _Mapping]] = ..., log_probs: _Optional[_Union[Array, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., num_top_next_tokens: _Optional[int] = ..., distributions: _Optional[_Union[Distributions, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("sequence", "proposals", "error", "memory_bytes", "learning", "open_s", "observe_s", "propose_s", "prefix_queries", "prefix_hits", "is_draining", "num_others")
    class LearningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_S_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    error: str
    memory_bytes: int
    learning: _containers.ScalarMap[str, int]
    open_s: float
    observe_s: float
    propose_s: float
    prefix_queries: int
    prefix_hits: int
    is_draining: bool
    num_others: int
    def __init__(self, sequence: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., error: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., learning: _Optional[_Mapping[str, int]] = ..., open_s: _Optional[float] = ..., observe_s: _Optional[float] = ..., propose_s: _Optional[float] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., is_draining: _Optional[bool] = ..., num_others: _Optional[int] = ...) -> None: ...

class ToDrafter(_message.Message):
    __slots__ = ("hello", "step", "more_features")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MORE_FEATURES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    more_features: MoreFeatures
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., more_features: _Optional[_Union[MoreFeatures, _Mapping]] = ...) -> None: ...

class FromDrafter(_message.Message):
    __slots__ = ("hello", "answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    answer: Answer
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...
