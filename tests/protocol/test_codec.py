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
    if origin is typing.Annotated:
        return within(of_type(args[0]), args[0], args[1])
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
        hints = typing.get_type_hints(kind, include_extras=True)
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


def within(
    values: st.SearchStrategy[typing.Any], kind: typing.Any, bounds: msgspec.Meta
) -> st.SearchStrategy[typing.Any]:
    """Those of the values that lie in the bounds; numbers are drawn from them at once. Texts and lists are short."""
    low, high = bounds.ge if bounds.ge is not None else bounds.gt, bounds.le
    if kind is float:
        return st.floats(low, high, exclude_min=bounds.gt is not None)
    if low is not None or high is not None:
        return st.integers(typing.cast(int, low), typing.cast(int, high) if high is not None else 2**63 - 1)
    assert bounds.max_length is not None
    assert bounds.max_length > 20
    return values


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
    at_limit = messages.Heartbeat(1, 2, "", 0, 3, 4, 5, False, b"")  # type: ignore[arg-type]
    room_bytes = MAX_MESSAGE_BYTES - len(encode(at_limit)[1]) - 3  # longer bytes have three more bytes of header
    fits = msgspec.structs.replace(at_limit, active=b"x" * room_bytes)
    assert CODECS["ToPrefill"].decode(encode(fits)) == fits
    with pytest.raises(MessageError, match="is over the limit of 16777216"):
        encode(msgspec.structs.replace(at_limit, active=b"x" * (room_bytes + 1)))


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"), [(10.0, 12.5, 2.5), (0.0, 12.5, 0.0), (10.0, 0.0, 0.0), (-1.0, 5.0, 0.0)]
)
def test_s34_a_duration_of_which_a_stamp_was_never_set_is_0(start_s: float, end_s: float, expected: float) -> None:
    assert messages.duration_s(start_s, end_s) == expected


def encoded(**fields: object) -> list[bytes]:
    return [HEADER, msgspec.msgpack.encode(fields)]


ABORT = {"type": "Abort", "epoch": 1, "to_epoch": 2, "reply_to": "tcp://d:1", "registration": 1}
ABORT |= {"room": 1, "ticket": 1, "reason": "r"}
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": float("nan")},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"min_p": 5.0},
    {"repetition_penalty": 0.0},
    {"presence_penalty": float("inf")},
    {"top_logprobs": -5},
    {"top_logprobs": 21},
    {"logit_bias": [(1, float("nan"))]},
    {"top_k": -2},
]


@pytest.mark.parametrize(
    "changed",
    [
        {"ticket": 2**63},
        {"room": -1},
        {"reply_to": "tcp://" + "x" * 300},
        {"reason": "x" * 3000},
    ],
)
def test_a24_what_is_out_of_bounds_is_malformed(changed: dict[str, object]) -> None:
    assert isinstance(CODECS["ToPrefill"].decode(encoded(**ABORT)), messages.Abort)
    with pytest.raises(MessageError):
        CODECS["ToPrefill"].decode(encoded(**ABORT | changed))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a24_a_sampling_that_no_forward_survives_is_malformed(sampling: dict[str, object]) -> None:
    """It would take the other prompts of its batch along."""
    message = ABORT | {"type": "Prefill", "request": "r", "tokens": b"", "dst_first_position": 0, "dst_pages": b""}
    message |= {"slot": 0, "remaining_ms": 1, "digest": False}
    del message["reason"]
    assert isinstance(CODECS["ToPrefill"].decode(encoded(**message, sampling={"seed": 1})), messages.Prefill)
    with pytest.raises(MessageError):
        CODECS["ToPrefill"].decode(encoded(**message, sampling={"seed": 1} | sampling))


def test_a24_a_peers_texts_are_short() -> None:
    """What a peer says ends up in the front's status, which has to fit in a message."""
    register = {k: v for k, v in ABORT.items() if k not in ("room", "ticket", "reason")}
    register |= {"type": "Register", "session": "h:1", "regions": []}
    CODECS["ToPrefill"].decode(encoded(**register, fingerprint={"model": "x" * 2048}))
    for fingerprint in ({"model": "x" * 2049}, {"x" * 257: ""}, {str(i): "" for i in range(65)}):
        with pytest.raises(MessageError):
            CODECS["ToPrefill"].decode(encoded(**register, fingerprint=fingerprint))
    assert len(messages.short("x" * 9000)) == 2048
