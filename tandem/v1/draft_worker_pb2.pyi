from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftWorkerGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftWorkerGetModelInfoResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _generation_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class DraftWorkerGenerateRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _generation_pb2.Generation
    def __init__(self, generation: _Optional[_Union[_generation_pb2.Generation, _Mapping]] = ...) -> None: ...

class DraftWorkerGenerateResponse(_message.Message):
    __slots__ = ("chunk", "completion")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    chunk: _generation_pb2.GenerateChunk
    completion: _generation_pb2.GenerateCompletion
    def __init__(self, chunk: _Optional[_Union[_generation_pb2.GenerateChunk, _Mapping]] = ..., completion: _Optional[_Union[_generation_pb2.GenerateCompletion, _Mapping]] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("tokens", "speculation_length", "sampling", "tokenizer_sha256", "rule", "model_speculation_length", "prompt_length", "drafts", "draft_ahead", "send_first", "send_more", "max_total_tokens", "least_probability")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    MODEL_SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SEND_FIRST_FIELD_NUMBER: _ClassVar[int]
    SEND_MORE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAST_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    speculation_length: int
    sampling: _generation_pb2.Sampling
    tokenizer_sha256: str
    rule: _generation_pb2.VerificationRule
    model_speculation_length: int
    prompt_length: int
    drafts: _generation_pb2.Drafts
    draft_ahead: int
    send_first: int
    send_more: int
    max_total_tokens: int
    least_probability: float
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., speculation_length: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., tokenizer_sha256: _Optional[str] = ..., rule: _Optional[_Union[_generation_pb2.VerificationRule, str]] = ..., model_speculation_length: _Optional[int] = ..., prompt_length: _Optional[int] = ..., drafts: _Optional[_Union[_generation_pb2.Drafts, str]] = ..., draft_ahead: _Optional[int] = ..., send_first: _Optional[int] = ..., send_more: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., least_probability: _Optional[float] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("draft_tokens", "proposed_by", "queue_seconds", "compute_seconds", "server_seconds", "distributions", "step_rows", "base_length", "drafted", "messages_read", "doubted")
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_READ_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    proposed_by: _containers.RepeatedScalarFieldContainer[str]
    queue_seconds: float
    compute_seconds: float
    server_seconds: float
    distributions: _containers.RepeatedCompositeFieldContainer[_generation_pb2.SparseDistribution]
    step_rows: int
    base_length: int
    drafted: int
    messages_read: int
    doubted: bool
    def __init__(self, draft_tokens: _Optional[_Iterable[int]] = ..., proposed_by: _Optional[_Iterable[str]] = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., server_seconds: _Optional[float] = ..., distributions: _Optional[_Iterable[_Union[_generation_pb2.SparseDistribution, _Mapping]]] = ..., step_rows: _Optional[int] = ..., base_length: _Optional[int] = ..., drafted: _Optional[int] = ..., messages_read: _Optional[int] = ..., doubted: bool = ...) -> None: ...
