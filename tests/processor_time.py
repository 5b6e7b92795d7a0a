"""Measures the suite in processor seconds: user and system time of a worker and its descendants.

A busy machine makes every test longer in wall-clock time, but hardly in processor time. A run ends
with the sum; `--dearest N` also lists the N dearest tests and files.
"""

import os
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest

PROPERTY = "processor_seconds"
START = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--dearest", type=int, default=0, metavar="N", help="list N tests and files")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Totals(config.getoption("dearest")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[START] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append((PROPERTY, processor_seconds() - item.stash[START]))
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[PROPERTY] = processor_seconds()


class Totals:
    """Adds up the processor seconds of tests and workers in the process that prints the summary."""

    def __init__(self, dearest):
        self.dearest, self.tests, self.workers = dearest, Counter(), 0.0

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.tests[report.nodeid] += dict(report.user_properties).get(PROPERTY, 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.workers += getattr(node, "workeroutput", {}).get(PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        files = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        for counted in (self.tests, files) if self.dearest else ():
            terminalreporter.section("processor seconds")
            for name, seconds in counted.most_common(self.dearest):
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        total = self.workers + time.process_time() if self.workers else processor_seconds()
        terminalreporter.write_line(f"{total:,.0f} processor seconds, user and system")


def processor_seconds():
    """Processor time so far of this process, its ended descendants and the warm process's forks.

    Children that still run are not in it: a test ends its own.
    """
    return sum(os.times()[:4]) + _seconds_of(forkserver._forkserver._forkserver_pid)


def _seconds_of(pid):
    """User and system time of a process and of its children that ended."""
    text = Path(f"/proc/{pid}/stat").read_text() if pid else ""
    fields = text[text.rfind(")") + 2 :].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
