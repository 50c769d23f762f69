from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillWorkerGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillWorkerGetModelInfoResponse(_message.Message):
    __slots__ = ("model", "layout")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    model: _generation_pb2.ModelInfo
    layout: PageLayout
    def __init__(self, model: _Optional[_Union[_generation_pb2.ModelInfo, _Mapping]] = ..., layout: _Optional[_Union[PageLayout, _Mapping]] = ...) -> None: ...

class PageLayout(_message.Message):
    __slots__ = ("weights_revision", "dtype", "backend", "format", "page_tokens", "page_bytes")
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights_revision: str
    dtype: str
    backend: str
    format: str
    page_tokens: int
    page_bytes: int
    def __init__(self, weights_revision: _Optional[str] = ..., dtype: _Optional[str] = ..., backend: _Optional[str] = ..., format: _Optional[str] = ..., page_tokens: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("token_ids", "first_page", "layout", "adapter", "adapter_revision")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_page: int
    layout: PageLayout
    adapter: str
    adapter_revision: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., first_page: _Optional[int] = ..., layout: _Optional[_Union[PageLayout, _Mapping]] = ..., adapter: _Optional[str] = ..., adapter_revision: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: KvPages
    def __init__(self, pages: _Optional[_Union[KvPages, _Mapping]] = ...) -> None: ...

class KvPages(_message.Message):
    __slots__ = ("first_page", "data", "checksums")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    data: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_page: _Optional[int] = ..., data: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...
