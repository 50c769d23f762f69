from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetVerifierGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetVerifierGetModelInfoResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _generation_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class TargetVerifierGenerateRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _generation_pb2.Generation
    def __init__(self, generation: _Optional[_Union[_generation_pb2.Generation, _Mapping]] = ...) -> None: ...

class TargetVerifierGenerateResponse(_message.Message):
    __slots__ = ("chunk", "completion")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    chunk: _generation_pb2.GenerateChunk
    completion: _generation_pb2.GenerateCompletion
    def __init__(self, chunk: _Optional[_Union[_generation_pb2.GenerateChunk, _Mapping]] = ..., completion: _Optional[_Union[_generation_pb2.GenerateCompletion, _Mapping]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "prefix", "prompt_length", "sampling", "rule", "tokenizer_sha256", "max_total_tokens", "weights_revision", "dtype", "vocab_size", "adapter", "adapter_revision", "features", "report_margins", "logprobs", "run_follows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REPORT_MARGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RUN_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefix: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _generation_pb2.Sampling
    rule: _generation_pb2.VerificationRule
    tokenizer_sha256: str
    max_total_tokens: int
    weights_revision: str
    dtype: str
    vocab_size: int
    adapter: str
    adapter_revision: str
    features: FeatureRequest
    report_margins: bool
    logprobs: int
    run_follows: bool
    def __init__(self, session_id: _Optional[str] = ..., prefix: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., rule: _Optional[_Union[_generation_pb2.VerificationRule, str]] = ..., tokenizer_sha256: _Optional[str] = ..., max_total_tokens: _Optional[int] = ..., weights_revision: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_revision: _Optional[str] = ..., features: _Optional[_Union[FeatureRequest, _Mapping]] = ..., report_margins: bool = ..., logprobs: _Optional[int] = ..., run_follows: bool = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("layers", "format", "start")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    format: _generation_pb2.FeatureFormat
    start: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., format: _Optional[_Union[_generation_pb2.FeatureFormat, str]] = ..., start: _Optional[int] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("start", "values")
    START_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    start: int
    values: bytes
    def __init__(self, start: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("committed_length", "reused_length", "lease_seconds", "queue_seconds", "prefill_seconds", "max_speculation_length", "rule", "processed_fields", "max_unread_tokens", "adapter_revision", "features")
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REUSED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MAX_UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    committed_length: int
    reused_length: int
    lease_seconds: float
    queue_seconds: float
    prefill_seconds: float
    max_speculation_length: int
    rule: _generation_pb2.VerificationRule
    processed_fields: _containers.RepeatedScalarFieldContainer[str]
    max_unread_tokens: int
    adapter_revision: str
    features: Features
    def __init__(self, committed_length: _Optional[int] = ..., reused_length: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., max_speculation_length: _Optional[int] = ..., rule: _Optional[_Union[_generation_pb2.VerificationRule, str]] = ..., processed_fields: _Optional[_Iterable[str]] = ..., max_unread_tokens: _Optional[int] = ..., adapter_revision: _Optional[str] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("session_id", "base_length", "last_token", "draft_tokens", "distributions", "run_until", "max_step_drafts", "stop_token_ids", "max_step_copies", "opening_sent", "takes_several")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_UNTIL_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_COPIES_FIELD_NUMBER: _ClassVar[int]
    OPENING_SENT_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    base_length: int
    last_token: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    distributions: _containers.RepeatedCompositeFieldContainer[_generation_pb2.SparseDistribution]
    run_until: int
    max_step_drafts: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_step_copies: int
    opening_sent: bool
    takes_several: bool
    def __init__(self, session_id: _Optional[str] = ..., base_length: _Optional[int] = ..., last_token: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., distributions: _Optional[_Iterable[_Union[_generation_pb2.SparseDistribution, _Mapping]]] = ..., run_until: _Optional[int] = ..., max_step_drafts: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_step_copies: _Optional[int] = ..., opening_sent: bool = ..., takes_several: bool = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("stale", "committed_length", "token_ids", "accepted", "replayed", "queue_seconds", "compute_seconds", "margins", "server_seconds", "step_rows", "step_width", "step_tokens", "logprobs", "drafted", "messages_read", "features", "copied", "next_steps")
    STALE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    SERVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_WIDTH_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_READ_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEPS_FIELD_NUMBER: _ClassVar[int]
    stale: bool
    committed_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    replayed: bool
    queue_seconds: float
    compute_seconds: float
    margins: _containers.RepeatedScalarFieldContainer[float]
    server_seconds: float
    step_rows: int
    step_width: int
    step_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    drafted: int
    messages_read: int
    features: bytes
    copied: bool
    next_steps: _containers.RepeatedCompositeFieldContainer[VerifyResponse]
    def __init__(self, stale: bool = ..., committed_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., replayed: bool = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., margins: _Optional[_Iterable[float]] = ..., server_seconds: _Optional[float] = ..., step_rows: _Optional[int] = ..., step_width: _Optional[int] = ..., step_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., drafted: _Optional[int] = ..., messages_read: _Optional[int] = ..., features: _Optional[bytes] = ..., copied: bool = ..., next_steps: _Optional[_Iterable[_Union[VerifyResponse, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("closed", "steps", "committed_length")
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    closed: bool
    steps: int
    committed_length: int
    def __init__(self, closed: bool = ..., steps: _Optional[int] = ..., committed_length: _Optional[int] = ...) -> None: ...
