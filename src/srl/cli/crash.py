"""What is said when a command ends in an exception that nobody expected."""

from __future__ import annotations

import errno
import tempfile
import traceback

from srl.safe_text import safe_message

_ENVIRONMENT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE}


def environment_error(error: BaseException) -> str | None:
    """One line when the machine is to blame (disk full, no permission), else None."""
    from srl.files import why_not_written

    where = getattr(error, "filename", None)
    if why := why_not_written(error):
        return f"{why.replace(';', f' at {where};') if where else why} and try again"
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        what = f"{error.strerror}: {where}" if where else str(error.strerror)
        return f"{what}; check the permissions and limits, or choose another --workspace"
    return None


def write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; one line that says what happened and where the file is."""
    what = f"{type(error).__name__}: {error}".partition("\n")[0]
    lines = safe_message("".join(traceback.format_exception(error)))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="srl-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(lines)
    except OSError:
        return f"internal error, {what}; the traceback could not be written:\n{lines}"
    return f"internal error, {what}; please report it with the traceback in {file.name}"
