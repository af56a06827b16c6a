"""Messages ↔ frames: ``[magic + version, msgpack]``. One decoder for every socket, typed, sized and versioned."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from shared.errors import MessageError
from shared.protocol.messages import PROTOCOL_VERSION

MAGIC = b"HO"
HEADER = MAGIC + PROTOCOL_VERSION.to_bytes(2, "little")
MAX_MESSAGE_BYTES = 16 << 20
"""Four million int32 tokens: far above any context, far below what could hurt the process."""

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> list[bytes]:
    """A message → its frames. Raises MessageError where the other side would not accept it."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise MessageError(f"a text in the message is no Unicode: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return [HEADER, body]


class Codec(Generic[M]):
    """Decodes one direction's union; ``Codec(ToPrefill)`` accepts nothing else."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frames: Sequence[bytes]) -> M:
        """Frames → a message. Raises MessageError, and nothing else, for whatever bytes come in."""
        if len(frames) != 2:
            raise MessageError(f"expected 2 frames, got {len(frames)}")
        header, body = frames
        if header[:2] != MAGIC or len(header) != len(HEADER):
            raise MessageError("not a frame of this protocol")
        if header != HEADER:
            version = int.from_bytes(header[2:], "little")
            raise MessageError(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
        if len(body) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"malformed message: {error}") from error
