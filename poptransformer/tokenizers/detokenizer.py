"""Token ids to text while they arrive."""

import codecs

# U+FFFD, which decoders write for bytes that are no character, or not yet one.
REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character shows as at most so many of them, one for each of its bytes.
MAX_UNFINISHED = 3
# Tokens decoded again in front of new ones: three U+FFFD can come of nine tokens, and spaces depend on a neighbour.
CONTEXT = 12


class StreamDetokenizer:
    """Turns ids into pieces of text; the pieces and the flush, joined, equal ``tokenizer.decode`` of all the ids.

    A piece never ends inside a character. What is held back: up to three U+FFFD at the end, which the next bytes may
    turn into a character, and with a byte-fallback tokenizer (SentencePiece: Llama, T5) a run of byte tokens for as
    long as it is valid UTF-8, because one wrong byte turns every byte of its run into U+FFFD. Bytes that can no longer
    become a character come out.

    A push decodes the new ids behind a few earlier ones, never all, so its cost does not grow with the text.
    """

    def __init__(self, tokenizer, skip_special_tokens=True):
        """Take a tokenizer: decode is needed; is_special, has_token, byte_value, decode_raw and clean_up are used."""
        self._decode_ids = getattr(tokenizer, "decode_raw", tokenizer.decode)
        self._skip_special = skip_special_tokens
        self._is_special = getattr(tokenizer, "is_special", lambda token_id: False)
        self._has_token = getattr(tokenizer, "has_token", lambda token_id: True)
        self._byte_value = getattr(tokenizer, "byte_value", lambda token_id: None)
        self._filters = [_Replace(old, new) for old, new in getattr(tokenizer, "clean_up", ())]
        self._window = []  # the last ids, all decided
        self._num_out = 0  # characters of the window's text that are out
        self._new = []  # ids that are not in the window yet
        self._run = _ByteRun()

    def push(self, token_ids):
        """Take the next ids and return the text that is certain by now, which may be empty."""
        for token_id in token_ids:
            # Ids without text go first, as decode drops them first: bytes on both sides of one make a character.
            if self._has_token(token_id) and not (self._skip_special and self._is_special(token_id)):
                self._new.append(token_id)
                self._run.push(token_id, self._byte_value(token_id))
        return self._filter(self._take(len(self._new) - self._run.num_open, is_last=False))

    def flush(self):
        """End the text: return what was held back, with U+FFFD for characters that never got complete."""
        return self._filter(self._take(len(self._new), is_last=True), is_last=True)

    def _take(self, count, is_last):
        """Move count new ids to the window and return the text that they make certain."""
        if not count and not is_last:
            return ""
        self._window += self._new[:count]
        del self._new[:count]
        text = self._decode(self._window)
        num_held = 0
        if not is_last and not self._run.was_used:
            num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
        # Not below what is out: a U+FFFD that is out by now was certain.
        end = max(len(text) - num_held, self._num_out)
        piece = text[self._num_out : end]
        self._num_out = end
        self._trim(len(text) - end)
        return piece

    def _trim(self, num_held):
        """Keep as little of the window as gives the same text later on."""
        if self._run.broken:
            # The bytes that broke the run must stay in sight for as long as it goes on.
            self._window = list(self._run.broken)
        elif len(self._window) > 3 * CONTEXT:
            tail = self._window[-CONTEXT:]
            # Some decoders drop spaces in front of the first text they see; then that text is kept as well.
            self._window = tail if self._decode(tail).strip() else self._window[:CONTEXT] + tail
        else:
            return
        self._num_out = len(self._decode(self._window)) - num_held

    def _decode(self, ids):
        return self._decode_ids(ids, skip_special_tokens=self._skip_special)

    def _filter(self, text, is_last=False):
        for replace in self._filters:
            text = replace.push(text) + (replace.flush() if is_last else "")
        return text


class _ByteRun:
    """Follows the byte-fallback tokens at the end of a sequence.

    Attributes:
      num_open: tokens of the current run if it is valid UTF-8 so far, perhaps unfinished; otherwise 0.
      broken: the few ids that make the current run invalid; empty if it is not.
      was_used: whether there was a byte-fallback token at all.
    """

    def __init__(self):
        self.was_used = False
        self._restart()

    def _restart(self):
        self.num_open = 0
        self.broken = []
        self._character = []  # ids since the last whole character
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token_id, value):
        """Take the next id, and the byte it stands for or None."""
        if value is None:
            if self.num_open or self.broken:
                self._restart()
            return
        self.was_used = True
        if self.broken:
            return
        self._character.append(token_id)
        self.num_open += 1
        try:
            if self._decoder.decode(bytes([value])):
                self._character.clear()
        except UnicodeDecodeError:
            self.broken = self._character
            self.num_open = 0


class _Replace:
    """``str.replace`` on a text that arrives in pieces."""

    def __init__(self, old, new):
        self._old, self._new = old, new
        self._held = ""

    def push(self, text):
        text = self._held + text
        done = []
        while (at := text.find(self._old)) >= 0:
            done += text[:at], self._new
            text = text[at + len(self._old) :]
        keep = next(n for n in range(min(len(self._old) - 1, len(text)), -1, -1) if text.endswith(self._old[:n]))
        self._held = text[len(text) - keep :]
        return "".join(done) + text[: len(text) - keep]

    def flush(self):
        text, self._held = self._held, ""
        return text
