"""The messages of Envoy's external processing, version 3, as far as a picker of endpoints needs them.

Declared here by field number and type (Envoy's API, `envoy/service/ext_proc/v3/external_processor.proto`, and the
files that it imports): what is not named is skipped on reading. The messages of a whole Envoy API would bring a
package of 100 times their size, or of slower code; a `.proto` file would bring a compiler to every build.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import struct_pb2  # the message's own file must be known before another one names it
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE: Final = "conductor.ext_proc"
_STRUCT: Final = struct_pb2.DESCRIPTOR.name
_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,  # enumerations, too
    "string": FieldDescriptorProto.TYPE_STRING,
}

# name: (number, type); a type in brackets is repeated, one behind "map:" the value of a map by strings.
_MESSAGES: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "[HeaderValue]")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "[HeaderValueOption]"), "remove_headers": (2, "[string]")},
    "Metadata": {"filter_metadata": (1, "map:Struct")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingMode": {
        "request_header_mode": (1, "int32"),
        "response_header_mode": (2, "int32"),
        "request_body_mode": (3, "int32"),
        "response_body_mode": (4, "int32"),
        "request_trailer_mode": (5, "int32"),
        "response_trailer_mode": (6, "int32"),
    },
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {
        "body": (1, "bytes"),
        "clear_body": (2, "bool"),
        "streamed_response": (3, "StreamedBodyResponse"),
    },
    "CommonResponse": {
        "status": (1, "int32"),
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
        "mode_override": (9, "ProcessingMode"),
    },
    "HealthCheckRequest": {"service": (1, "string")},  # of grpc.health.v1
    "HealthCheckResponse": {"status": (1, "int32")},
}


def _descriptors() -> DescriptorPool:
    """In a pool of their own: whoever else carries Envoy's messages is not disturbed."""
    file = FileDescriptorProto(
        name="conductor/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=[_STRUCT]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            if kind.startswith("map:"):
                _map_entry(message, field, kind.removeprefix("map:"))
                continue
            repeated = kind.startswith("[")
            field.label = (
                FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            )
            _set_type(field, kind.strip("[]"))
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        field.type = scalar
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{_PACKAGE}.{kind}"


def _map_entry(message: Any, field: FieldDescriptorProto, value_kind: str) -> None:
    name = "".join(part.title() for part in field.name.split("_")) + "Entry"
    entry = message.nested_type.add(name=name)
    entry.options.map_entry = True
    for number, (part, kind) in enumerate((("key", "string"), ("value", value_kind)), start=1):
        inner = entry.field.add(name=part, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        _set_type(inner, kind)
    field.label = FieldDescriptorProto.LABEL_REPEATED
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{name}"


_POOL: Final = _descriptors()


def _message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest: Final = _message("ProcessingRequest")
ProcessingResponse: Final = _message("ProcessingResponse")
HealthCheckRequest: Final = _message("HealthCheckRequest")
HealthCheckResponse: Final = _message("HealthCheckResponse")

BODY_NONE: Final = 0
BODY_STREAMED: Final = 1
BODY_BUFFERED: Final = 2
BODY_BUFFERED_PARTIAL: Final = 3
BODY_FULL_DUPLEX_STREAMED: Final = 4
SEND: Final = 1
SKIP: Final = 2
OVERWRITE_OR_ADD: Final = 2  # what is to become of a header that is there already
