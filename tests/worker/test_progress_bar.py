"""The line that fills while weights are read."""

import io

from octavo_worker.loading.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_line_that_fills():
    told, terminal = [], Terminal()
    bar = ProgressBar(lambda *progress: told.append(progress), terminal)
    for step in range(1001):
        bar("loading weights", step / 1000)
    lines = terminal.getvalue().split("\r")[1:]
    assert len(lines) == 101  # not one for each tensor
    assert lines[50].split("]")[0].count("#") == 20
    assert lines[-1].endswith("100 %\n")
    assert len(told) == 1001


def test_elsewhere_nothing_is_drawn_and_long_loads_are_logged(caplog, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with caplog.at_level("INFO"):
        bar = ProgressBar(lambda *_: None, stream)
        for step in range(11):
            bar("loading weights", step / 10)
        bar("warming up", None)
    assert stream.getvalue() == ""
    assert 1 <= len(caplog.messages) <= 5
    assert caplog.messages[0].startswith("loading weights: ")
