from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StructureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRUCTURE_KIND_UNSPECIFIED: _ClassVar[StructureKind]
    STRUCTURE_KIND_JSON_SCHEMA: _ClassVar[StructureKind]
    STRUCTURE_KIND_REGEX: _ClassVar[StructureKind]
    STRUCTURE_KIND_CHOICE: _ClassVar[StructureKind]
    STRUCTURE_KIND_GRAMMAR: _ClassVar[StructureKind]

class VerificationRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_RULE_UNSPECIFIED: _ClassVar[VerificationRule]
    VERIFICATION_RULE_AGREEMENT: _ClassVar[VerificationRule]
    VERIFICATION_RULE_REJECTION: _ClassVar[VerificationRule]

class Drafts(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTS_UNSPECIFIED: _ClassVar[Drafts]
    DRAFTS_NONE: _ClassVar[Drafts]
    DRAFTS_LOOKUP: _ClassVar[Drafts]
    DRAFTS_MODEL: _ClassVar[Drafts]
    DRAFTS_HEAD: _ClassVar[Drafts]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END_OF_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class FeatureFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_FORMAT_UNSPECIFIED: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_BFLOAT16: _ClassVar[FeatureFormat]
STRUCTURE_KIND_UNSPECIFIED: StructureKind
STRUCTURE_KIND_JSON_SCHEMA: StructureKind
STRUCTURE_KIND_REGEX: StructureKind
STRUCTURE_KIND_CHOICE: StructureKind
STRUCTURE_KIND_GRAMMAR: StructureKind
VERIFICATION_RULE_UNSPECIFIED: VerificationRule
VERIFICATION_RULE_AGREEMENT: VerificationRule
VERIFICATION_RULE_REJECTION: VerificationRule
DRAFTS_UNSPECIFIED: Drafts
DRAFTS_NONE: Drafts
DRAFTS_LOOKUP: Drafts
DRAFTS_MODEL: Drafts
DRAFTS_HEAD: Drafts
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END_OF_SEQUENCE: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FEATURE_FORMAT_UNSPECIFIED: FeatureFormat
FEATURE_FORMAT_BFLOAT16: FeatureFormat

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "structure")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: LogitBias
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    structure: Structure
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Union[LogitBias, _Mapping]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., structure: _Optional[_Union[Structure, _Mapping]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_ids", "biases")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: StructureKind
    text: str
    def __init__(self, kind: _Optional[_Union[StructureKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SparseDistribution(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("text", "token_ids", "messages", "chat", "sampling", "max_new_tokens", "speculation_length", "stop_token_ids", "stop_strings", "ignore_end_of_sequence", "report_margins", "max_total_tokens", "rule", "logprobs", "adapter", "drafts", "receipt", "prediction")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_OF_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_MARGINS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    messages: ChatMessages
    chat: bool
    sampling: Sampling
    max_new_tokens: int
    speculation_length: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_end_of_sequence: bool
    report_margins: bool
    max_total_tokens: int
    rule: VerificationRule
    logprobs: int
    adapter: str
    drafts: Drafts
    receipt: bool
    prediction: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., chat: bool = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., speculation_length: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_end_of_sequence: bool = ..., report_margins: bool = ..., max_total_tokens: _Optional[int] = ..., rule: _Optional[_Union[VerificationRule, str]] = ..., logprobs: _Optional[int] = ..., adapter: _Optional[str] = ..., drafts: _Optional[_Union[Drafts, str]] = ..., receipt: bool = ..., prediction: _Optional[str] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("token_ids", "text", "margins", "logprobs", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    margins: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    adapter: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., margins: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., adapter: _Optional[str] = ...) -> None: ...

class GenerateCompletion(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "output_tokens", "stats", "receipt")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    stats: SpeculationStats
    receipt: str
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., stats: _Optional[_Union[SpeculationStats, _Mapping]] = ..., receipt: _Optional[str] = ...) -> None: ...

class PartialGeneration(_message.Message):
    __slots__ = ("output_tokens", "token_ids")
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    output_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, output_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("rounds", "drafted", "accepted", "accepted_per_position", "drafted_per_position", "draft_seconds", "verify_seconds", "queue_seconds", "network_seconds", "prefill_seconds", "bytes_up", "bytes_down", "wasted_drafts", "drafted_by", "accepted_by", "stale_rounds", "stale_drafts", "sent_by_depth", "guessed_rounds", "rounds_by_length", "undrafted_rounds", "run_steps", "wasted_steps", "cached_prompt_tokens", "feature_bytes", "acceptance_histogram")
    class DraftedByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AcceptedByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    WASTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_FIELD_NUMBER: _ClassVar[int]
    STALE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STALE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SENT_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    GUESSED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RUN_STEPS_FIELD_NUMBER: _ClassVar[int]
    WASTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    network_seconds: float
    prefill_seconds: float
    bytes_up: int
    bytes_down: int
    wasted_drafts: int
    drafted_by: _containers.ScalarMap[str, int]
    accepted_by: _containers.ScalarMap[str, int]
    stale_rounds: int
    stale_drafts: int
    sent_by_depth: _containers.RepeatedScalarFieldContainer[int]
    guessed_rounds: int
    rounds_by_length: _containers.RepeatedScalarFieldContainer[int]
    undrafted_rounds: int
    run_steps: int
    wasted_steps: int
    cached_prompt_tokens: int
    feature_bytes: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., network_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., wasted_drafts: _Optional[int] = ..., drafted_by: _Optional[_Mapping[str, int]] = ..., accepted_by: _Optional[_Mapping[str, int]] = ..., stale_rounds: _Optional[int] = ..., stale_drafts: _Optional[int] = ..., sent_by_depth: _Optional[_Iterable[int]] = ..., guessed_rounds: _Optional[int] = ..., rounds_by_length: _Optional[_Iterable[int]] = ..., undrafted_rounds: _Optional[int] = ..., run_steps: _Optional[int] = ..., wasted_steps: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., feature_bytes: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_name", "weights_revision", "tokenizer_sha256", "vocab_size", "max_sequence_length", "max_speculation_length", "kv_slots", "dtype", "device", "backend", "draft_name", "default_speculation_length", "plain_width", "bit_exact", "startup_seconds", "end_of_sequence_ids", "adaptive_speculation_length", "adapters", "feature_layers", "feature_size", "rehearsals", "arithmetic", "receipt_key", "max_unread_tokens")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NAME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PLAIN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_FIELD_NUMBER: _ClassVar[int]
    STARTUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_OF_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_SPECULATION_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    REHEARSALS_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    weights_revision: str
    tokenizer_sha256: str
    vocab_size: int
    max_sequence_length: int
    max_speculation_length: int
    kv_slots: int
    dtype: str
    device: str
    backend: str
    draft_name: str
    default_speculation_length: int
    plain_width: int
    bit_exact: bool
    startup_seconds: float
    end_of_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    adaptive_speculation_length: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_size: int
    rehearsals: _containers.RepeatedCompositeFieldContainer[Rehearsal]
    arithmetic: str
    receipt_key: str
    max_unread_tokens: int
    def __init__(self, model_name: _Optional[str] = ..., weights_revision: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., max_speculation_length: _Optional[int] = ..., kv_slots: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., backend: _Optional[str] = ..., draft_name: _Optional[str] = ..., default_speculation_length: _Optional[int] = ..., plain_width: _Optional[int] = ..., bit_exact: bool = ..., startup_seconds: _Optional[float] = ..., end_of_sequence_ids: _Optional[_Iterable[int]] = ..., adaptive_speculation_length: bool = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_size: _Optional[int] = ..., rehearsals: _Optional[_Iterable[_Union[Rehearsal, _Mapping]]] = ..., arithmetic: _Optional[str] = ..., receipt_key: _Optional[str] = ..., max_unread_tokens: _Optional[int] = ...) -> None: ...

class Rehearsal(_message.Message):
    __slots__ = ("part", "name", "device", "source", "steps", "late_steps", "late_seconds")
    PART_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    LATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    part: str
    name: str
    device: str
    source: str
    steps: int
    late_steps: int
    late_seconds: float
    def __init__(self, part: _Optional[str] = ..., name: _Optional[str] = ..., device: _Optional[str] = ..., source: _Optional[str] = ..., steps: _Optional[int] = ..., late_steps: _Optional[int] = ..., late_seconds: _Optional[float] = ...) -> None: ...
