"""Frames ↔ messages: every message survives the way, and no bytes whatever raise anything but MessageError. (A24)"""

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import MessageError
from shared.protocol import local, messages
from shared.protocol.codec import HEADER, MAX_MESSAGE_BYTES, Codec, encode

UNIONS: dict[str, typing.Any] = {
    "ToPrefill": messages.ToPrefill,
    "ToDecode": messages.ToDecode,
    "ToEngine": local.ToEngine,
    "ToFront": local.ToFront,
}
CODECS = {name: Codec[msgspec.Struct](union) for name, union in UNIONS.items()}

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def of_type(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a field's declared type."""
    if isinstance(kind, typing.NewType):
        return of_type(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(of_type(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(of_type(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if args:
        return st.one_of([of_type(arg) for arg in args])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: of_type(hints[name]) for name in kind.__struct_fields__})
    plain: dict[typing.Any, st.SearchStrategy[typing.Any]] = {
        int: INT64,
        str: TEXT,
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
    }
    return plain[kind]


MEMBERS = [(name, member) for name, union in UNIONS.items() for member in typing.get_args(union)]
IDS = [f"{name}-{member.__name__}" for name, member in MEMBERS]


@pytest.mark.parametrize(("name", "member"), MEMBERS, ids=IDS)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_every_message_survives_the_round_trip(name: str, member: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(of_type(member))
    frames = encode(message)
    assert len(frames) == 2
    assert all(frames)
    decoded = CODECS[name].decode(frames)
    assert decoded == message
    assert type(decoded) is member


@pytest.mark.parametrize(("name", "member"), MEMBERS, ids=IDS)
def test_a_message_is_understood_by_its_own_directions_only(name: str, member: type[msgspec.Struct]) -> None:
    message = _sample(member)
    for other, union in UNIONS.items():
        if member not in typing.get_args(union):
            with pytest.raises(MessageError):
                CODECS[other].decode(encode(message))


def _sample(member: type[msgspec.Struct]) -> msgspec.Struct:
    """The simplest value of each field."""
    body = {name: _simple(kind) for name, kind in typing.get_type_hints(member).items()}
    return member(**body)


def _simple(kind: typing.Any) -> typing.Any:
    if isinstance(kind, typing.NewType):
        return _simple(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return args[0]
    if origin in (list, dict):
        return origin()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _sample(kind)
    return None if args else kind()


def only_message_error(codec: Codec[msgspec.Struct], frames: list[bytes]) -> None:
    try:
        message = codec.decode(frames)
    except MessageError:
        return
    assert codec.decode(encode(message)) == message  # luck: then it is a message like any other


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(frames=st.lists(st.binary(max_size=64), max_size=4), name=st.sampled_from(sorted(CODECS)))
def test_random_frames(frames: list[bytes], name: str) -> None:
    only_message_error(CODECS[name], frames)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(body=st.binary(max_size=64), name=st.sampled_from(sorted(CODECS)))
def test_random_bodies_under_a_good_header(body: bytes, name: str) -> None:
    only_message_error(CODECS[name], [HEADER, body])


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(data=st.data(), which=st.sampled_from(MEMBERS))
def test_right_shape_wrong_types(data: st.DataObject, which: tuple[str, type[msgspec.Struct]]) -> None:
    name, member = which
    body = msgspec.to_builtins(_sample(member), builtin_types=(bytes,))
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(JSON_LIKE)
    only_message_error(CODECS[name], [HEADER, msgspec.msgpack.encode(body)])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.data(), which=st.sampled_from(MEMBERS))
def test_one_byte_changed(data: st.DataObject, which: tuple[str, type[msgspec.Struct]]) -> None:
    name, member = which
    body = bytearray(encode(_sample(member))[1])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    only_message_error(CODECS[name], [HEADER, bytes(body)])


@pytest.mark.parametrize(("name", "member"), MEMBERS, ids=IDS)
def test_truncated_at_every_byte(name: str, member: type[msgspec.Struct]) -> None:
    body = encode(_sample(member))[1]
    for length in range(len(body)):
        with pytest.raises(MessageError):
            CODECS[name].decode([HEADER, body[:length]])


GOOD = encode(_sample(messages.Ack))[1]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "expected 2 frames, got 0"),
        ([HEADER], "expected 2 frames, got 1"),
        ([HEADER, GOOD, b""], "expected 2 frames, got 3"),
        ([b"", GOOD], "not a frame of this protocol"),
        ([b"XX\x01\x00", GOOD], "not a frame of this protocol"),
        ([HEADER + b"\x00", GOOD], "not a frame of this protocol"),
        ([b"HO\xff\x00", GOOD], "protocol version 255, this side speaks"),
        ([HEADER, b""], "malformed message: Input data was truncated"),
        ([HEADER, GOOD + b"\x00"], "malformed message: MessagePack data is malformed: trailing characters"),
        ([HEADER, b"\x80"], "malformed message: Object missing required field `type`"),
        ([HEADER, b"\x81\xa4type\xa6Nobody"], "malformed message: Invalid value 'Nobody'"),
        ([HEADER, b"\xa2\xc3\x28"], "malformed message: "),  # a string that is no UTF-8
        ([HEADER, b"\xdd\xff\xff\xff\xff"], "malformed message: "),  # claims four thousand million items
        ([HEADER, b"\x91" * 100_000 + b"\xc0"], "malformed message: "),  # deep
        ([HEADER, b"\x81\xa4type" + b"\x91" * 100_000], "malformed message: "),
        ([HEADER, bytes(range(256)) * 256], "malformed message: "),
        ([HEADER, bytes(MAX_MESSAGE_BYTES + 1)], "is over the limit of 16777216"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(frames: list[bytes], reason: str) -> None:
    with pytest.raises(MessageError) as caught:
        CODECS["ToPrefill"].decode(frames)
    assert reason in caught.value.message


def test_an_unknown_field_is_refused() -> None:
    body = msgspec.to_builtins(_sample(messages.Ack), builtin_types=(bytes,)) | {"later": 1}
    with pytest.raises(MessageError, match="unknown field `later`"):
        CODECS["ToPrefill"].decode([HEADER, msgspec.msgpack.encode(body)])


def test_a_deeply_nested_value_inside_a_message() -> None:
    head = encode(_sample(messages.Registered))[1]
    cut = head.index(b"capacity") + len(b"capacity")
    with pytest.raises(MessageError):
        CODECS["ToDecode"].decode([HEADER, head[:cut] + b"\x81\xa1x" * 100_000])


def test_sixty_four_kibibytes_of_noise() -> None:
    noise = b"".join(msgspec.msgpack.encode(i * 2654435761) for i in range(12_000))[: 64 << 10]
    for codec in CODECS.values():
        with pytest.raises(MessageError):
            codec.decode([HEADER, noise])


def test_too_large_to_be_accepted_is_refused_before_it_is_sent() -> None:
    at_limit = messages.Abort(1, 2, "", 0, 3, 4, "")  # type: ignore[arg-type]
    room_bytes = MAX_MESSAGE_BYTES - len(encode(at_limit)[1]) - 4  # a longer string has four more bytes of header
    fits = msgspec.structs.replace(at_limit, reason="x" * room_bytes)
    assert CODECS["ToPrefill"].decode(encode(fits)) == fits
    with pytest.raises(MessageError, match="is over the limit of 16777216"):
        encode(msgspec.structs.replace(at_limit, reason="x" * (room_bytes + 1)))


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"), [(10.0, 12.5, 2.5), (0.0, 12.5, 0.0), (10.0, 0.0, 0.0), (-1.0, 5.0, 0.0)]
)
def test_s34_a_duration_of_which_a_stamp_was_never_set_is_0(start_s: float, end_s: float, expected: float) -> None:
    assert messages.duration_s(start_s, end_s) == expected
