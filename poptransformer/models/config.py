"""Reading the keys of a checkpoint's config.json."""

from __future__ import annotations

from poptransformer.errors import UserError

MOST_LAYERS = 10_000  # building more takes minutes and memory, and means a damaged config
LARGEST_NUMBER = 3.4e38  # what float32 holds
LARGEST_SIZE = 2**31 - 1  # of an axis, as int32 indices reach it


def read_config(config: dict, **keys: str) -> dict:
    """Take required sizes out of a config.json, under the project's own names.

    Args:
      config: the parsed file.
      keys: our name -> key in the file; each must be a positive whole number.
    Raises: UserError naming every key that is missing, not a positive whole number, or beyond LARGEST_SIZE or MOST_LAYERS.
    """
    wrong = [
        f"{key}={config[key]!r}" if key in config else f"{key} (missing)"
        for key in keys.values()
        if not _is_size(config.get(key))
    ]
    if wrong:
        raise UserError(f"config.json: wanted positive whole numbers for {', '.join(wrong)}")
    sizes = {name: config[key] for name, key in keys.items()}
    if sizes.get("num_layers", 1) > MOST_LAYERS:
        raise UserError(
            f"config.json: {keys['num_layers']}={sizes['num_layers']} is more than any model has; at most {MOST_LAYERS}"
        )
    return sizes


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def read_bool(config: dict, key: str, default: bool) -> bool:
    """Take a switch that may be missing out of a config.json. Raises: UserError if it is not true or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key}={value!r}: wanted true or false")
    return value


def read_number(config: dict, key: str, default: float) -> float:
    """Take a number that may be missing out of a config.json. Raises: UserError if it is not a number of at least 0."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST_NUMBER:
        raise UserError(f"config.json: {key}={value!r}: wanted a number of at least 0")
    return value


REQUIRED = object()


class ConfigReader:
    """Reads a config.json key by key, and says all that is wrong with it at once when its block ends.

        with ConfigReader(config) as read:
            return cls(hidden_size=read.size("hidden_size"), is_tied=read.switch("tie_word_embeddings", True))

    Where a value is missing or wrong the methods note it down and return one that lets the block go on.
    """

    def __init__(self, config: dict):
        self.config = config
        self._no_sizes: list[str] = []
        self._no_token_ids: list[str] = []
        self._problems: list[str] = []

    def __enter__(self) -> ConfigReader:
        return self

    def __exit__(self, kind, error, traceback):
        problems = list(self._problems)
        if self._no_token_ids:
            problems.insert(0, f"wanted token ids within the vocabulary for {', '.join(self._no_token_ids)}")
        if self._no_sizes:
            problems.insert(0, f"wanted positive whole numbers for {', '.join(self._no_sizes)}")
        if problems and (kind is None or issubclass(kind, UserError)):
            problems += [str(error)] if error else []
            text = "; ".join(problem.removeprefix("config.json: ") for problem in problems)
            raise (kind or UserError)(f"config.json: {text}") from None

    def problem(self, text: str) -> None:
        """Note down something that is wrong with the config."""
        self._problems.append(text)

    def size(self, *keys: str, default=REQUIRED) -> int:
        """A positive whole number under any of the keys; null counts as missing.

        Args:
          keys: names that the size goes by; where the file has several, they must agree.
          default: what stands for a missing one.
        """
        given = [key for key in keys if self.config.get(key) is not None]
        key = given[0] if given else keys[0]
        value = self.config.get(key)
        if any(self.config[other] != value for other in given):
            self.problem(f"{' and '.join(f'{key}={self.config[key]!r}' for key in given)} mean the same and differ")
        if value is None and default is not REQUIRED:
            return default
        if _is_size(value):
            return value
        self._no_sizes.append(f"{key} (missing)" if key not in self.config else f"{key}={value!r}")
        return 1

    def num_layers(self, *keys: str) -> int:
        """As `size`, and at most MOST_LAYERS."""
        value = self.size(*keys)
        if value > MOST_LAYERS:
            self.problem(f"{keys[0]}={value} is more than any model has; at most {MOST_LAYERS}")
            return 1
        return value

    def token_id(self, key: str, vocab_size: int, default: int | None = None) -> int:
        """A number of the vocabulary, 0 included; `default`, if it is one, stands for a missing one or null."""
        value = default if self.config.get(key) is None else self.config[key]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value and (value < vocab_size or self._no_sizes):
            return value
        self._no_token_ids.append(f"{key} (missing)" if key not in self.config else f"{key}={value!r}")
        return 0

    def switch(self, key: str, default: bool) -> bool:
        """True or false; `default` where the file has no such key."""
        return self._try(read_bool, key, default)

    def number(self, key: str, default: float) -> float:
        """A number of at least 0; `default` where the file has no such key."""
        return self._try(read_number, key, default)

    def check_multiple(self, key: str, size: int, divisor_key: str, divisor: int) -> None:
        """Note it down if a size is not a multiple of another; where sizes are wrong already, that is enough."""
        if not self._no_sizes and size % divisor:
            self.problem(f"{key}={size} is not a multiple of {divisor_key}={divisor}")

    def _try(self, function, key, default):
        try:
            return function(self.config, key, default)
        except UserError as error:
            self._problems.append(str(error))
            return default
