"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

MISSING = "not to be had here: "
"""How the reason of a test begins that is skipped for want of a program or a right that a machine could have."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pairs", type=int, default=None, help="pairs of layouts that the family test draws")
    parser.addoption("--pairs-seed", type=int, default=None, help="what the family test draws them from")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where ``CI`` is set nothing may be missing: what would be skipped for it fails."""
    report = yield
    if report.skipped and os.environ.get("CI") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(MISSING):
            report.outcome = "failed"
            report.longrepr = f"{reason}; with CI set, a test is not left out for that"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was drawn and from which seed, also where all is well."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            said = [value for name, value in getattr(report, "user_properties", ()) if name == "pairs"]
            if said and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {'; '.join(said)}")
