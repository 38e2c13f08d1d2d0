"""What every accounting result has in common: rows of plain numbers, a text table, HTML and JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

Row = dict[str, Any]


def format_bytes(count: float | None) -> str:
    """Write a number of bytes with a binary unit.

    Args:
      count: bytes; ``None`` means unknown.

    Returns:
      A short text: whole bytes below 1 KiB, else two decimals (one from 100 up) and KiB, MiB, GiB or TiB.

    Examples:
      >>> format_bytes(1000), format_bytes(1536), format_bytes(12 * 2**30), format_bytes(None)
      ('1000 B', '1.50 KiB', '12.00 GiB', '-')
    """
    if count is None:
        return "-"
    if abs(count) < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(abs(count), 1024)), 4)
    value = count / 1024**power
    digits = 1 if abs(value) >= 100 else 2
    return f"{value:.{digits}f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def format_count(count: float | None) -> str:
    """Write a large number with a decimal suffix (k, M, G, T, P), as FLOPs are usually quoted.

    Examples:
      >>> format_count(950), format_count(12_500_000), format_count(3.2e15), format_count(None)
      ('950', '12.5 M', '3.2 P', '-')
    """
    if count is None:
        return "-"
    power = min(int(math.log10(abs(count)) // 3), 6) if abs(count) >= 1000 else 0
    value, suffix = count / 1000**power, ("", " k", " M", " G", " T", " P", " E")[power]
    return f"{value:.0f}{suffix}" if abs(value) >= 100 else f"{value:.3g}{suffix}"


def format_seconds(seconds: float | None) -> str:
    """Write a duration in s, ms or us.

    Examples:
      >>> format_seconds(2.5), format_seconds(0.0123), format_seconds(4.2e-05), format_seconds(None)
      ('2.50 s', '12.30 ms', '42.00 us', '-')
    """
    if seconds is None:
        return "-"
    scale, unit = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")
    return f"{seconds / scale:.2f} {unit}"


def format_percent(share: float | None) -> str:
    """Write a share between 0 and 1 in percent.

    Examples:
      >>> format_percent(0.4567), format_percent(None)
      ('45.7 %', '-')
    """
    return "-" if share is None else f"{100 * share:.1f} %"


def format_plain(value: Any) -> str:
    """Write a value as it is; shapes as ``(2, 3)``, ``None`` as ``-``."""
    return "-" if value is None else str(value)


Formatter = Callable[[Any], str]


class Report:
    """Base of all results. Subclasses are frozen dataclasses that say ``title``, ``rows`` and ``notes``.

    ``columns`` maps the key of a row to the function that writes its value; its order is the order of the
    printed columns. Rows may hold more keys than are printed: ``to_json`` keeps them all.
    """

    columns: ClassVar[Mapping[str, Formatter]] = {}

    @property
    def title(self) -> str:
        """One line that says what the table shows."""
        raise NotImplementedError

    @property
    def rows(self) -> list[Row]:
        """The result as plain data: bytes and FLOPs as ints, times in seconds, shares between 0 and 1."""
        raise NotImplementedError

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of the numbers needs: assumptions, gaps, totals."""
        return ()

    @property
    def sections(self) -> tuple[Report, ...]:
        """Further reports printed below this one."""
        return ()

    def printed_rows(self) -> Sequence[Row]:
        """The rows that the text table shows (all of them unless a subclass shortens the list)."""
        return self.rows

    def __str__(self) -> str:
        parts = [self.title]
        table = text_table(self.printed_rows(), self.columns)
        if table:
            parts.append(table)
        parts += [f"  {note}" for note in self.notes]
        text = "\n".join(parts)
        return "\n\n".join([text, *(str(section) for section in self.sections)])

    def _repr_html_(self) -> str:
        body = html_table(self.printed_rows(), self.columns)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        inner = "".join(section._repr_html_() for section in self.sections)
        return f"<div><p><b>{html.escape(self.title)}</b></p>{body}{notes}{inner}</div>"

    def to_dict(self) -> dict[str, Any]:
        """The whole result as JSON-ready data: ``title``, ``rows``, ``notes`` and nested ``sections``."""
        data: dict[str, Any] = {
            "title": self.title,
            "rows": [{key: _plain(value) for key, value in row.items()} for row in self.rows],
            "notes": list(self.notes),
        }
        if self.sections:
            data["sections"] = [section.to_dict() for section in self.sections]
        return data

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def text_table(rows: Sequence[Row], columns: Mapping[str, Formatter]) -> str:
    """Lay rows out as aligned text: words to the left, everything that starts with a digit to the right.

    Examples:
      >>> print(text_table([{"what": "weights", "bytes": 2048}], {"what": str, "bytes": format_bytes}))
      what     |    bytes
      ---------+---------
      weights  | 2.00 KiB
    """
    if not rows or not columns:
        return ""
    cells = [[formatter(row.get(key)) for key, formatter in columns.items()] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(columns)]
    numeric = [all(line[i][:1] in "0123456789-+" for line in cells) for i in range(len(widths))]

    def render(line: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        return "  | ".join(padded).rstrip()

    rule = "--+-".join("-" * width for width in widths)
    return "\n".join([render(list(columns)), rule, *(render(line) for line in cells)])


def html_table(rows: Sequence[Row], columns: Mapping[str, Formatter]) -> str:
    """The same table as HTML, for notebooks."""
    if not rows or not columns:
        return ""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in columns)
    lines = (
        "<tr>"
        + "".join(f"<td>{html.escape(formatter(row.get(key)))}</td>" for key, formatter in columns.items())
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
