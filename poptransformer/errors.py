"""The errors a caller can act on. Everything else that is raised is a bug in this project."""


class UserError(ValueError):
    """A value, file or setting given by the caller is wrong; the message says what, where and what to do."""


class UnsupportedError(UserError, NotImplementedError):
    """What was asked for is sound but not built; the message lists what is."""


def near_miss(word, known):
    """Return ``"; did you mean 'x'?"`` for the closest of the known words, or an empty string.

    Args:
      word: the unknown word.
      known: iterable of the words that would have been right.
    """
    import difflib

    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
