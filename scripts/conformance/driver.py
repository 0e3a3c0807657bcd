"""What runs the tests of one module in whatever interpreter it finds itself in. Its text is handed over, so it imports nothing of ours.

Each test is announced before it runs and reported when it has: of one that takes its interpreter down, the announcement is left.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import unittest
from collections.abc import Iterator
from typing import Any

MARK = "@@conformance "


def say(*words: str) -> None:
    """Past whatever a test has made of sys.stdout, on a line of its own."""
    os.write(1, f"\n{MARK}{json.dumps(words)}\n".encode("ascii"))


class Reported(unittest.TestResult):
    """Says how each test ended; one with subtests fails when one of them does."""

    worst: tuple[str, str] | None = None
    ended: tuple[str, str] | None = None

    def startTest(self, test: Any) -> None:
        self.worst, self.ended = None, None
        say("begins", test.id())

    def stopTest(self, test: Any) -> None:
        say("ended", test.id(), *(self.worst or self.ended or ("failed", "it reported nothing")))

    def addSuccess(self, test: Any) -> None:
        self.ended = "passed", ""

    def addExpectedFailure(self, test: Any, error: Any) -> None:
        self.ended = "passed", "fails, as it is expected to"

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.worst = "failed", "succeeds, and was expected to fail"

    def addSkip(self, test: Any, reason: str) -> None:
        self.ended = "skipped", reason

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self._broke(test, error)

    def addFailure(self, test: Any, error: Any) -> None:
        self._broke(test, error)

    def addError(self, test: Any, error: Any) -> None:
        self._broke(test, error)
        if not isinstance(test, unittest.TestCase):  # a class or module that could not be set up: none of its tests will begin
            say("ended", test.id(), *(self.worst or ()))

    def _broke(self, test: Any, error: Any) -> None:
        self.worst = "failed", f"{error[0].__name__}: {error[1]}"[:400]


def cases(suite: Any) -> Iterator[Any]:
    """Every test in a suite of suites."""
    for each in suite:
        if isinstance(each, unittest.BaseTestSuite):
            yield from cases(each)
        else:
            yield each


def main(package: str, module: str, only: list[str] | None, done: list[str]) -> None:
    """Run the tests of `test.<module>`, which lies in the directory `package`: those named, or all, but for those that are done."""
    made = type(sys)("test")  # the standard library that it comes from is another version's, and stays out of the search path
    made.__path__, made.__file__ = [package], f"{package}/__init__.py"
    sys.modules["test"] = made
    support: Any = importlib.import_module("test.support")

    support.use_resources = []  # nothing that takes minutes, gigabytes or the network
    support.verbose = 0

    def perform(*suites: Any) -> None:
        loader = unittest.defaultTestLoader
        every = cases(each if isinstance(each, unittest.BaseTestSuite) else loader.loadTestsFromTestCase(each) for each in suites)
        chosen = [test for test in every if test.id() not in done and (only is None or test.id() in only)]
        unittest.TestSuite(chosen).run(Reported())

    loaded: Any = importlib.import_module(f"test.{module}")
    if hasattr(loaded, "test_main") and hasattr(loaded, "run_unittest"):  # as long as there are some that name their tests themselves
        loaded.run_unittest = perform
        loaded.test_main()
    else:
        perform(unittest.defaultTestLoader.loadTestsFromModule(loaded))
    say("finished")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
