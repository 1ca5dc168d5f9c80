"""Files of a folder that may be missing, and JSON objects in them; all that is wrong with one is a UserError."""

import errno
import json
import os
import stat

from poptransformer.errors import UserError


def is_present(path):
    """Say whether a file is there.

    Raises: UserError, naming it, if something is there but no file to read: a folder, a link that leads nowhere, a place
      without permission.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        if os.path.islink(path):
            raise UserError(f"{path}: is a link to {os.readlink(path)}, which is not there; fetch it again") from None
        return False
    except ValueError as error:  # a null character, or half a surrogate pair
        raise UserError(f"{str(path)!r}: is not a file name") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a folder; a file is wanted")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is neither a file nor a link to one")
    return True


def read_json(path, is_optional=False):
    """Read a JSON object.

    Args:
      path: a pathlib.Path.
      is_optional: True gives an empty dict where there is no such file.
    Returns: dict.
    Raises: UserError, naming the file, if it cannot be read or holds something else.
    """
    if not is_present(path):
        if is_optional:
            return {}
        raise UserError(f"{path}: no such file; a checkpoint needs its {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # a byte order mark, as some editors write it, is skipped
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is wanted, this is a {type(value).__name__}")
    return value
