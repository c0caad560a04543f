from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--pairs", type=int, default=None, help="pairs of layouts that the family test draws")
    parser.addoption("--pairs-seed", type=int, default=None, help="what the family test draws them from")


def pytest_terminal_summary(terminalreporter):
    """Say what was drawn and from which seed, also where all is well."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            said = [value for name, value in getattr(report, "user_properties", ()) if name == "pairs"]
            if said and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {'; '.join(said)}")
