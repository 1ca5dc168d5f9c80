"""Reading the keys of a checkpoint's config.json."""

from __future__ import annotations

from poptransformer.errors import UserError


def read_config(config: dict, **keys: str) -> dict:
    """Take required keys out of a config.json, under the project's own names.

    Args:
      config: the parsed file.
      keys: our name -> key in the file; each must be a positive number.
    Raises: UserError naming every key that is missing or not a positive number.
    """
    wrong = [f"{key}={config.get(key)!r}" if key in config else f"{key} (missing)" for key in keys.values()
             if isinstance(config.get(key), bool) or not isinstance(config.get(key), int) or config[key] < 1]  # fmt: skip
    if wrong:
        raise UserError(f"config.json: wanted positive whole numbers for {', '.join(wrong)}")
    return {name: config[key] for name, key in keys.items()}
