"""Puts measured tables into a document, between the marks that name them. Pure."""

from __future__ import annotations


def with_section(text: str, name: str, section: str) -> str:
    """Returns the document with what stands between `<!-- NAME -->` and `<!-- /NAME -->` replaced.

    Raises: ValueError when the document has no such marks.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, opened, rest = text.partition(start)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the document has no section {name}: {start} ... {end}")
    return f"{head}{start}\n{section.strip()}\n{end}{tail}"
