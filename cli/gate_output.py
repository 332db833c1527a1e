"""What the gate says: a table, JUnit, Markdown, annotations of GitHub.

Pure functions from findings to text. What always holds: names and problems out of a document are
escaped for the place where they are put, as a document may be anybody's.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rich import box
from rich.table import Table
from rich.text import Text

from gockpt.results.verdicts import COLUMNS, Finding, Outcome, Report, written


def table(report: Report) -> Table:
    """For people."""
    body = Table(
        caption=f"Times in {'seconds' if report.absolute else 'steps of none'}.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in COLUMNS:
        right = name not in ("strategy", "check", "result")
        body.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in report.findings:
        *cells, result = one.cells
        body.add_row(*map(Text, cells), Text(result, style=_style(one.outcome)))
    return body


def _style(outcome: Outcome) -> str:
    if outcome.fails:
        return "red"
    return "yellow" if outcome is Outcome.UNKNOWN else ""


# -- JUnit -----------------------------------------------------------------------------------------

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """One test case a check; what could not be decided is skipped."""
    suite = ElementTree.Element(
        "testsuite",
        name="gockpt gate",
        tests=str(len(report.findings)),
        failures=str(sum(one.outcome.fails for one in report.findings)),
        skipped=str(sum(_is_skipped(one) for one in report.findings)),
        errors="0",
    )
    for one in report.findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(one.strategy), name=_xml(one.metric)
        )
        if one.outcome.fails:
            ElementTree.SubElement(case, "failure", message=_xml(sentence(one)))
        elif _is_skipped(one):
            ElementTree.SubElement(case, "skipped", message=_xml(sentence(one)))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _is_skipped(one: Finding) -> bool:
    return one.outcome in (Outcome.UNKNOWN, Outcome.SKIPPED)


def _xml(text: str) -> str:
    """What XML 1.0 has no way to write is left out."""
    return _NOT_XML.sub("", text)


def sentence(one: Finding) -> str:
    """A check in one line."""
    said = f"{one.strategy}, {one.metric}: {one.outcome}"
    if one.worse_by is not None:
        said += f", {written(one.baseline)} → {written(one.current)} ({one.worse} worse)"
    return f"{said}; {one.detail}" if one.detail else said


# -- Markdown --------------------------------------------------------------------------------------

_MARKS = {
    "&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "\\`", "*": "\\*", "_": "\\_",
    "[": "\\[", "]": "\\]", "@": "&#64;", "#": "&#35;", "\\": "\\\\",
}  # fmt: skip


def markdown(report: Report) -> str:
    """A comment for a pull request."""
    lines = [f"### gockpt gate: {report.verdict}", "", cell(report.summary), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for one in report.findings:
        cells = map(cell, one.cells)
        row = "| " + " | ".join(cells) + " |"
        lines.append(row)
    lines += ["", *(f"- {cell(one)}" for one in report.warnings)]
    return "\n".join(lines).rstrip() + "\n"


def cell(text: str) -> str:
    """Text that stays in its cell, mentions nobody and links nowhere."""
    return "".join(_MARKS.get(sign, sign) for sign in " ".join(text.split()))


# -- GitHub ----------------------------------------------------------------------------------------


def github(report: Report) -> list[str]:
    """Workflow commands: an error for each check that fails, a warning for what is not known."""
    lines = []
    for one in report.findings:
        if one.outcome.fails:
            lines.append(_command("error", sentence(one)))
        elif one.outcome is Outcome.UNKNOWN:
            lines.append(_command("warning", sentence(one)))
    return lines + [_command("warning", one) for one in report.warnings]


def _command(level: str, message: str) -> str:
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title=gockpt gate::{text}"
