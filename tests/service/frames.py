"""Frames as the bytes that travel."""

from service.wire import Frame, header


def packed(frame: Frame) -> bytes:
    """The header and the payload."""
    return header(frame.kind, frame.request_id, len(frame.payload), *frame[3:]) + bytes(frame.payload)
