"""Calls into tokenizer libraries, which raise what they like."""

import contextlib

from poptransformer.errors import UserError

# Raised on in a library's call, these say nothing about its input.
NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)


@contextlib.contextmanager
def errors_as(what):
    """Turn all that is raised into a UserError that begins with these words: Exception itself, panics in Rust, anything."""
    try:
        yield
    except (*NOT_OURS, UserError):
        raise
    except BaseException as error:
        raise UserError(f"{what}: {error}") from error
