from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--pairs", type=int, default=None, help="pairs of layouts that the family test draws")
    parser.addoption("--pairs-seed", type=int, default=None, help="what the family test draws them from")
