"""Pickles read as data: nothing in them is ever imported, called or made.

A pickle is a program for a stack machine, and Python's own reader runs what it says: any function, with any arguments. This
one steps through the instructions that plain values take, ``pickletools`` telling them apart, and knows names and calls only
as the ones it is given. Anything else ends in a UserError, and so does a file made to take memory or time: the numbers of
bytes and of instructions are limited, dicts stay lists of pairs (nothing in a file is hashed but text, nor compared, nor
printed in full), and there is no recursion.
"""

import dataclasses
import pickletools
from collections.abc import Callable

from poptransformer.errors import UnsupportedError, UserError

MAX_BYTES = 16 << 20  # of one pickle; a weight takes about 200
MAX_STEPS = 2_000_000  # of one pickle; a weight takes about 50, and a step makes at most one object

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8".split()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """What stands for a function or type that a pickle may call.

    Attributes:
      call: takes the PickleReader and a tuple of arguments, which may be anything, and returns the value.
    """

    call: Callable


class Pairs:
    """What stands for a dict: its keys and values in the order they were written, keys of any kind."""

    __slots__ = ("may_have_state", "pairs")

    def __init__(self, pairs=(), may_have_state=False):
        self.pairs, self.may_have_state = list(pairs), may_have_state

    def named(self):
        """Return a dict of the values whose keys are text."""
        return {key: value for key, value in self.pairs if type(key) is str}


class PickleReader:
    """Reads one pickle after another from a file in memory.

    Args:
      where: what messages start with, the file's name.
      file: io.BytesIO.
      names: what the names that a pickle may mention stand for, "module name" -> a Function or an inert value.
      load_persistent: called with this reader and a persistent id, returns its value; None refuses them.
      unread: names that are known but have no reader, "module name" -> what they make, for the message.
    """

    def __init__(self, where, file, names, load_persistent=None, unread=()):
        self._where, self._file, self._names, self._load_persistent = where, file, names, load_persistent
        self._unread = dict(unread)

    def read(self):
        """Return the next pickle's value: None, bool, int, float, str, bytes, tuple, list, Pairs, or what names stand for.

        Raises: UserError for a pickle that is damaged, too large, or does what data does not; UnsupportedError if it
          mentions an unread name.
        """
        self._memo, self._stack, self._outer, self._steps = {}, [], [], 0
        try:
            for opcode, argument, _ in pickletools.genops(self._file):
                self._spend(1)
                if opcode.name == "STOP":
                    return self._pop()
                self._step(opcode.name, argument)
        except UserError:
            raise
        except (ValueError, IndexError) as error:
            raise self.damaged(_shown(error)) from error
        raise self.damaged("it has no end")

    def _step(self, name, argument):
        """Take one instruction; the stack is cut into pieces at its marks, all but the last of them in _outer."""
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            at = len(self._memo) if argument is None else argument
            if not 0 <= at < MAX_STEPS:
                raise self.damaged("a number of the memo is out of range")
            self._memo[at] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            if argument not in self._memo:
                raise self.damaged("a value is asked for that is not there")
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name in _TUPLES:
            values = [self._pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(values)))
        elif name == "TUPLE":
            self._push(tuple(self._pop_to_mark()))
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append(Pairs())
        elif name == "DICT":
            self._push(Pairs(self._paired(self._pop_to_mark())))
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._top(Pairs).pairs.append((key, value))
        elif name == "SETITEMS":
            items = self._paired(self._pop_to_mark())
            self._top(Pairs).pairs.extend(items)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "LIST":
            self._push(self._pop_to_mark())
        elif name == "APPEND":
            value = self._pop()
            self._top(list).append(value)
        elif name == "APPENDS":
            values = self._pop_to_mark()
            self._top(list).extend(values)
        elif name == "GLOBAL":
            stack.append(self._find(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            if type(attribute) is not str or type(module) is not str:
                raise self.odd("a name that is no text")
            stack.append(self._find(f"{module} {attribute}"))
        elif name == "REDUCE":
            self._call()
        elif name == "BUILD":
            state = self._pop()
            if not (isinstance(target := self._top(), Pairs) and target.may_have_state and isinstance(state, Pairs)):
                raise self.odd("an object with a state of its own")
        elif name == "BINPERSID":
            if self._load_persistent is None:
                raise self.odd("a persistent id")
            stack.append(self._load_persistent(self, self._pop()))
        elif name == "POP":
            if stack:
                stack.pop()
            else:
                self._pop_to_mark()
        elif name == "POP_MARK":
            self._pop_to_mark()
        elif name == "DUP":
            stack.append(self._top())
        elif name == "INST":
            self._find(argument)
            raise self.odd(f"the instruction {name}")
        elif name not in ("PROTO", "FRAME"):
            raise self.odd(f"the instruction {name}")

    def _call(self):
        """Call one of our own functions."""
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Function) or type(arguments) is not tuple:
            raise self.odd("a call of something that is no function")
        self._push(function.call(self, arguments))

    def read_ordered_dict(self, arguments):
        """Return what ``collections.OrderedDict`` makes: of no arguments, or of pairs as Python 2 wrote them."""
        items = arguments[0] if arguments else []
        if len(arguments) > 1 or type(items) is not list or not all(type(item) is list and len(item) == 2 for item in items):
            raise self.odd("an OrderedDict of something else than pairs")
        self._spend(len(items))  # of which one list may be used many times
        return Pairs(map(tuple, items), may_have_state=True)

    def _find(self, name):
        if name in self._names:
            return self._names[name]
        shown = _shown(name.replace(" ", "."))
        if name in self._unread:
            raise UnsupportedError(f"{self._where}: holds {self._unread[name]} ({shown}), for which there is no reader")
        raise UserError(
            f"{self._where}: needs {shown}, which weights do not; such a file can run code, so it is not read any further. "
            "Take the weights as safetensors, or save model.state_dict() alone"
        )

    def _pop(self):
        if not self._stack:
            raise self.damaged("a value is missing")
        return self._stack.pop()

    def _push(self, value):
        self._stack.append(value)

    def _top(self, kind=object):
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise self.damaged("a value is missing, or of another kind")
        return self._stack[-1]

    def _pop_to_mark(self):
        if not self._outer:
            raise self.damaged("a mark is missing")
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _paired(self, values):
        if len(values) % 2:
            raise self.damaged("a dict has a key without a value")
        return zip(values[::2], values[1::2], strict=True)

    def _spend(self, count):
        self._steps += count
        if self._steps > MAX_STEPS:
            raise UserError(f"{self._where}: its pickle takes more than {MAX_STEPS} steps, which weights do not")

    def damaged(self, why):
        """Return the error for a pickle that cannot be read."""
        return UserError(f"{self._where}: damaged: its pickle cannot be read ({why}); fetch it again")

    def odd(self, what):
        """Return the error for a pickle that does what data does not."""
        return UserError(
            f"{self._where}: its pickle has {what}, which weights have not; such a file can run code, so it is not read any "
            "further. Take the weights as safetensors, or save model.state_dict() alone"
        )


def _shown(text, limit=100):
    """Return a text in one line that any terminal can show."""
    text = str(text)
    return ascii(text[:limit])[1:-1] + ("..." if len(text) > limit else "")
