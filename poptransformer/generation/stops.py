"""Stop strings: where a generated text ends, and how much of it is certain while it arrives."""

from poptransformer.errors import UserError


class StopStrings:
    """Watches a text that arrives in pieces for the first of several stop strings.

    The earliest match in the text wins; of two that begin at one place, the one that ends first. So a stop string that
    begins with another one never gets its turn, and is dropped. Text is held back only while it may be the beginning
    of a stop string. How the text is cut into pieces changes nothing.

    Attributes:
      is_stopped: whether a stop string was found.
    """

    def __init__(self, stop_strings):
        """Take one string or several; none means that nothing stops and nothing is held."""
        stop_strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
        for stop in stop_strings:
            if not isinstance(stop, str):
                raise UserError(f"a stop string is text, not {type(stop).__name__}; give ids as stop token ids")
            if not stop:
                raise UserError("a stop string is empty, and would end every text before it begins; leave it out")
        shortest_first = sorted(set(stop_strings), key=len)
        self._stops = []
        for stop in shortest_first:
            if not stop.startswith(tuple(self._stops)):
                self._stops.append(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text):
        """Take the next piece.

        Returns: (text that is safe to emit, whether a stop string was found); the stop string and what follows it are
          never emitted, and neither is anything pushed after it.
        """
        if self.is_stopped:
            return "", True
        text = self._held + text
        end = self._first_match(text)
        begin = self._unfinished(text)
        if end is not None and end <= begin:  # otherwise a match that began before this one may still come
            self._held, self.is_stopped = "", True
            return text[:end], True
        self._held = text[begin:]
        return text[:begin], False

    def flush(self):
        """End the text: return what was held back, less a stop string in it."""
        text, self._held = self._held, ""
        end = self._first_match(text)
        self.is_stopped |= end is not None
        return text[:end]

    def _first_match(self, text):
        """Return where the first stop string begins, or None."""
        return min((at for at in map(text.find, self._stops) if at >= 0), default=None)

    def _unfinished(self, text):
        """Return where the longest end of text begins that is the beginning of a stop string, but not all of it."""
        longest = max(map(len, self._stops), default=1) - 1
        for begin in range(max(len(text) - longest, 0), len(text)):
            tail = text[begin:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return begin
        return len(text)
