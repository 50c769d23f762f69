from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

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
