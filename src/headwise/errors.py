"""Failures that a person can cause and can mend. The command line shows each as one line."""

from __future__ import annotations


class HeadwiseError(Exception):
    """What went wrong, what was wanted, and what to do, in one line."""


class MissingExtra(HeadwiseError, ImportError):
    """An optional library is not installed; the message carries its install line."""


class UnknownModel(HeadwiseError):
    """A model name that is no packaged default, no directory, no file, no hub id."""


class BadInput(HeadwiseError):
    """An input that the model cannot take: empty, too long, unreadable."""


class BadSetting(HeadwiseError, ValueError):
    """An environment variable that asks for what is unknown or cannot be had."""


class BadFile(HeadwiseError):
    """A file that is corrupt or is not what its name says."""


class NothingToWatch(HeadwiseError):
    """A model in which no attention call could be caught."""
