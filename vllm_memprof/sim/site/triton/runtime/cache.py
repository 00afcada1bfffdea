"""No cache of compiled kernels; the two encoders are used by torch for file names."""

import base64


def _encode(encoder, key):
    return encoder(bytes.fromhex(key)).decode("ascii").rstrip("=")


def _base32(key):
    return _encode(base64.b32encode, key)


def _base64(key):
    return _encode(base64.urlsafe_b64encode, key)
