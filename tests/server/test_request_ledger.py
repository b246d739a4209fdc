"""What the front keeps of requests in flight, and whom it blames for a crash."""

from __future__ import annotations

from octavo_core.wire import EngineCoreOutput
from octavo_server.request_ledger import MAX_TRIALS, TRIAL_TOKENS, RequestLedger
from support.engine_fakes import make_request


def ledger_of(*names: str) -> RequestLedger:
    ledger = RequestLedger()
    for name in names:
        ledger.add(make_request(name, 4), is_sent=True)
    return ledger


def tokens(name: str, *token_ids: int, ends: bool = False) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(token_ids), "stop" if ends else None)


def pass_trial(ledger: RequestLedger, name: str) -> None:
    ledger.note([tokens(name, *range(TRIAL_TOKENS))])
    assert ledger.is_cleared([name])


def test_a_crash_sends_requests_again_with_their_tokens() -> None:
    ledger = ledger_of("a", "b", "c")
    ledger.note([tokens("a", 1), tokens("b", 2), tokens("c", 3)])
    ledger.note([tokens("a", 4), tokens("c", 5, ends=True)])
    assert ledger.note_crash() == []
    resumed = {request.request_id: request for request in ledger.unsent()}
    assert resumed["a"].output_token_ids == [1, 4]
    assert resumed["b"].output_token_ids == [2]
    assert "c" not in resumed
    assert all(request.is_resumed for request in resumed.values())
    assert ledger.unsent() == []


def test_what_waited_for_the_new_engine_is_no_suspect() -> None:
    ledger = ledger_of("a")
    ledger.note_crash()
    ledger.add(make_request("late", 4), is_sent=False)
    assert ledger.trials() == [["a"]]
    resumed, late = ledger.unsent()
    assert (late.request_id, late.is_resumed) == ("late", False)
    assert resumed.is_resumed


def test_two_crashes_in_service_fail_who_was_in_both() -> None:
    ledger = ledger_of("a", "b")
    ledger.note_crash()
    for (name,) in ledger.trials():
        ledger.unsent([name])
        pass_trial(ledger, name)
    ledger.note([tokens("b", 9, ends=True)])
    ledger.add(make_request("new", 4), is_sent=True)
    assert ledger.note_crash() == ["a"]
    assert len(ledger) == 1
    assert "new" in ledger


def test_only_the_one_on_trial_is_blamed() -> None:
    """32 streams, one of which kills engines: it alone fails."""
    names = [f"r{index}" for index in range(32)]
    ledger = ledger_of(*names)
    ledger.note_crash()
    trials = ledger.trials()
    assert trials == [[name] for name in names]
    for trial in trials[:20]:
        assert [request.request_id for request in ledger.unsent(trial)] == trial
        assert not ledger.is_cleared(trial)
        pass_trial(ledger, trial[0])
    ledger.unsent(trials[20])
    assert ledger.note_crash() == ["r20"]
    # The engine before had the first twenty as well; they are tried again, like the rest.
    assert ledger.trials() == [[name] for name in names if name != "r20"]


def test_a_request_that_ends_or_is_left_is_cleared() -> None:
    ledger = ledger_of("a", "b")
    ledger.note_crash()
    ledger.unsent()
    ledger.note([tokens("a", 7, ends=True)])
    assert ledger.is_cleared(["a"])
    assert not ledger.is_cleared(["a", "b"])
    ledger.remove(["b", "never seen"])
    assert ledger.is_cleared(["a", "b"])
    assert len(ledger) == 0


def test_many_suspects_share_their_trials() -> None:
    names = [f"r{index}" for index in range(1000)]
    ledger = ledger_of(*names)
    ledger.note_crash()
    trials = ledger.trials()
    assert len(trials) <= MAX_TRIALS
    assert [name for trial in trials for name in trial] == names


def test_a_crash_with_nobody_there() -> None:
    ledger = RequestLedger()
    assert ledger.note_crash() == []
    assert ledger.trials() == []
    assert ledger.unsent() == []


def test_prompts_wait_until_their_answers_begin() -> None:
    ledger = ledger_of("a", "b", "c", "d")
    assert ledger.num_waiting_tokens == 16
    ledger.note([tokens("a", 1), tokens("b"), tokens("c", ends=True)])
    assert ledger.num_waiting_tokens == 8
    ledger.note([tokens("a", 1, ends=True), tokens("b", 1)])
    ledger.note_crash()
    assert ledger.num_waiting_tokens == 4
    ledger.remove(["b", "d"])
    assert ledger.num_waiting_tokens == 0
