"""The exceptions of kvlab, and the one line a user reads when an optional package is missing.

Python's own exceptions serve where they fit: `ValueError` for a bad value, `TypeError` for a bad kind,
`NotImplementedError` for a combination no backend supports. A class stands here only where a caller may
want to catch that case and no other; each derives from the built-in it specialises, so `except ValueError`
keeps working.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BudgetError",
    "BuildError",
    "FormatError",
    "MissingExtraError",
    "OutOfMemory",
    "RankError",
    "needs_extra",
]


class OutOfMemory(MemoryError):
    """An allocation on the host or a device failed; the object it was for is as it was before the call.

    Examples
    --------
    >>> try:
    ...     raise OutOfMemory("the cache needs 6 GiB more than the GPU has")
    ... except MemoryError as error:
    ...     print(error)
    the cache needs 6 GiB more than the GPU has
    """


class BudgetError(ValueError):
    """A call does not fit the byte budget of a cache; nothing was changed.

    Parameters
    ----------
    message : str
        What did not fit, and what to do.
    needed_bytes : int, optional
        The smallest budget, in bytes, under which the refused call would have fitted.
    longest_length : int, optional
        The longest length up to the refused one, in tokens, that fits the present budget.

    Examples
    --------
    >>> try:
    ...     raise BudgetError("100 tokens need 4096 bytes", needed_bytes=4096, longest_length=60)
    ... except ValueError as error:
    ...     error.needed_bytes, error.longest_length
    (4096, 60)
    """

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, longest_length: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.longest_length = longest_length


class FormatError(ValueError):
    """A file is damaged, truncated, of an unknown version, or was not written by kvlab.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from kvlab import MixedPrecisionCache
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "notes.txt")
    ...     _ = path.write_text("no cache at all")
    ...     MixedPrecisionCache.load(path)
    Traceback (most recent call last):
    kvlab.errors.FormatError: ...
    """


class BuildError(RuntimeError):
    """The CUDA compiler refused a source; the message is its log, with file and line of every error."""


class RankError(RuntimeError):
    """Another rank of a process group died, or did not answer within the group's timeout."""


class MissingExtraError(ImportError):
    """An optional package is not installed; the message is one line that says what to install."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a missing package inside the block into one line that names the extra to install.

    Only a package that is absent is translated; one that is installed and broken raises as it did.

    Parameters
    ----------
    extra : str
        Name of the extra in `pyproject.toml`, for example ``"hf"``.
    what : str
        The part of kvlab that needs it, as the user knows it.

    Raises
    ------
    MissingExtraError
        If a module imported in the block does not exist.

    Examples
    --------
    >>> with needs_extra("hf", "kvlab.quantized"):
    ...     import a_missing_package
    Traceback (most recent call last):
        ...
    kvlab.errors.MissingExtraError: kvlab.quantized needs a_missing_package, which is not installed: ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtraError):
            raise
        package = (error.name or str(error)).partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {package}, which is not installed: pip install 'kvlab[{extra}]'", name=error.name
        ) from None
