"""From what is known of each rank to a job's outcome, and the scraps that it is told from."""

from __future__ import annotations

import math
import signal
import threading
from types import SimpleNamespace

import pytest

from zerobench.bench.launch.environments import free_ports, local_environments
from zerobench.bench.launch.given import Answer, GivenRank, merge, run_part
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome, failed_at_s, judge
from zerobench.bench.launch.ranks import RankState, where
from zerobench.bench.protocol.job import Progress, RankError, Report, Skipped
from zerobench.results.schema import RowDtypes

DTYPES = RowDtypes(param="float32", compute="float32", reduce="float32", master="float32", state="float32")


def rank(number: int, **known) -> RankState:
    return RankState(rank=number, pid=1, pipe=-1, **known)


def reported(number: int) -> RankState:
    return rank(number, report=Report(dtypes=DTYPES), exit_code=0, open=False)


def raised(number: int, at_s: float, **error) -> RankState:
    values = {"type": "ValueError", "message": "no", "phase": "measurement", "at_s": at_s, **error}
    return rank(number, error=RankError(**values), exit_code=1, open=False)


def outcome(*ranks: RankState, stalled=None, was_oom_killed=False, **limits):
    return judge(list(ranks), stalled=stalled or {}, timeout_s=10, was_oom_killed=was_oom_killed, **limits)


def test_all_reports_are_ok() -> None:
    found = outcome(reported(0), reported(1))
    assert found.status == "ok"
    assert sorted(found.reports) == [0, 1]


def test_one_report_missing_is_a_failure() -> None:
    found = outcome(reported(0), rank(1, exit_code=3, open=False))
    assert (found.status, found.error) == ("failed", "rank 1 ended with exit code 3 and no report")


def test_a_limit_of_memory_is_named_where_libraries_end_a_rank_without_a_word() -> None:
    aborted, left = rank(1, exit_signal=signal.SIGABRT, open=False), rank(1, exit_code=1, open=False)
    for silent in (aborted, left):
        found = outcome(reported(0), silent, rank_memory_bytes=1 << 25)
        assert found.status == "failed"
        assert found.error is not None and "the 0.0312 GiB that --rank-memory-gib allows" in found.error
        plain = outcome(reported(0), silent).error
        assert plain is not None and "memory" not in plain
    killed = rank(1, exit_signal=signal.SIGKILL, open=False)
    found = outcome(reported(0), killed, rank_memory_bytes=1 << 25)
    assert found.error is not None and "memory" not in found.error


def test_the_killed_rank_is_named_and_not_its_peers_complaint() -> None:
    killed = rank(1, exit_signal=signal.SIGKILL, progress=Progress(phase="measurement", step=7), open=False)
    found = outcome(raised(0, 1.0, type="RuntimeError", message="Connection closed by peer"), killed)
    assert found.error == "rank 1 was killed by SIGKILL: after step 7 of measurement"


def test_a_kill_is_oom_only_when_the_kernel_counted_one() -> None:
    killed = rank(1, exit_signal=signal.SIGKILL, open=False)
    assert outcome(reported(0), killed).status == "failed"
    found = outcome(reported(0), killed, was_oom_killed=True)
    assert found.status == "oom"
    assert found.error is not None and "out-of-memory killer" in found.error and found.oom_tier == "host"
    segfault = rank(0, exit_signal=signal.SIGSEGV, open=False)
    assert outcome(segfault, reported(1), was_oom_killed=True).status == "failed"
    assert outcome(segfault, killed, was_oom_killed=True).status == "oom"


def test_how_a_rank_ends_after_its_own_word_counts_no_more() -> None:
    """Such as one that crashes while it closes after an error."""
    said = raised(0, 1.0)
    said.exit_code, said.exit_signal = None, signal.SIGSEGV
    assert outcome(said, reported(1)).error == "rank 0: ValueError: no"


def test_a_failure_is_as_old_as_the_error_or_the_silent_end() -> None:
    assert failed_at_s(raised(0, 7.0)) == 7.0
    assert failed_at_s(rank(0, exit_signal=signal.SIGKILL, exit_s=8.0, open=False)) == 8.0
    done = reported(0)
    done.exit_s = 9.0
    assert failed_at_s(done) == failed_at_s(rank(0)) == math.inf


def test_the_first_error_of_a_rank_itself_counts() -> None:
    peers = raised(0, 1.0, type="CommunicationError", message="rank 1 is gone", communication=True)
    found = outcome(peers, raised(1, 2.0))
    assert found.error == "rank 1: ValueError: no"
    assert not found.secondary
    alone = outcome(peers, rank(1))
    assert (alone.error, alone.secondary) == ("rank 0: CommunicationError: rank 1 is gone", True)
    stopped = outcome(reported(0), rank(1))  # of given ranks: the failure was another host's
    assert (stopped.status, stopped.secondary) == ("failed", True)
    assert stopped.error == "rank 1 was stopped after ranks elsewhere failed"
    both = outcome(raised(0, 2.0, message="second"), raised(1, 1.0, message="first"))
    assert both.error == "rank 1: ValueError: first"
    memory = {"type": "MemoryError", "out_of_memory": "host"}
    both = outcome(raised(0, 2.0, message="second", **memory), raised(1, 1.0, message="first", **memory))
    assert both.error == "rank 1: MemoryError: first"


def test_memory_that_ran_out_on_one_rank_is_oom() -> None:
    found = outcome(raised(0, 1.0), raised(1, 2.0, type="MemoryError", out_of_memory="host"))
    assert found.oom_tier == "host"
    assert (found.status, found.error) == ("oom", "rank 1: MemoryError: no")


def test_stalled_ranks_are_named_with_their_place() -> None:
    found = outcome(raised(0, 1.0, message="timed out"), rank(1), stalled={1: "step (mine.py:3)"})
    assert found.error == (
        "no progress for 10 s (--timeout): rank 1 in step (mine.py:3); rank 0: ValueError: timed out"
    )
    both = outcome(rank(0), rank(1), stalled={1: "step (mine.py:3)", 0: "wait (mine.py:9)"})
    assert (
        both.error
        == "no progress for 10 s (--timeout): rank 0 in wait (mine.py:9), rank 1 in step (mine.py:3)"
    )


def test_all_ranks_must_agree_to_be_skipped() -> None:
    skipped = Skipped(reason="needs a GPU")
    found = outcome(rank(0, skipped=skipped, open=False), rank(1, skipped=skipped, open=False))
    assert (found.status, found.error) == ("skipped", "needs a GPU")
    found = outcome(rank(0, skipped=skipped, open=False), raised(1, 1.0))
    assert (found.status, found.error) == ("failed", "rank 1: ValueError: no")


def test_the_outcome_of_given_ranks_is_the_worst_part() -> None:
    fine = Answer(
        status="ok", secondary=False, reports={0: Report(dtypes=DTYPES)}, error=None, failed_at_s=None
    )
    also = Answer(
        status="ok", secondary=False, reports={1: Report(dtypes=DTYPES)}, error=None, failed_at_s=None
    )
    victim = Answer(status="failed", secondary=True, reports={}, error="stopped", failed_at_s=None)
    cause = Answer(status="failed", secondary=False, reports={}, error="broke", failed_at_s=7.0)
    assert sorted(merge([fine, also]).reports) == [0, 1]
    assert merge([fine, victim, cause]).error == "broke"
    assert merge([fine, victim]).error == "stopped"
    later = Answer(status="failed", secondary=False, reports={}, error="peer is gone", failed_at_s=7.5)
    assert merge([later, cause]).error == "broke"
    timeless = Answer(status="failed", secondary=False, reports={}, error="who knows", failed_at_s=None)
    assert merge([timeless, cause]).error == "broke"
    full = Outcome(status="oom", error="no memory", oom_tier="device", failed_at_s=9.0)
    found = merge([fine, cause, Answer.from_text(Answer.of(full).text())])
    assert (found.status, found.error, found.oom_tier) == ("oom", "no memory", "device")
    skipped = Answer.of(Outcome(status="skipped", error="needs a GPU"))
    assert (skipped.failed_at_s, merge([fine, skipped]).error) == (None, "needs a GPU")
    assert merge([skipped, cause]).error == "broke"


@pytest.mark.parametrize("status", ["failed", "oom", "skipped", "ok"])
def test_given_ranks_end_their_part_where_anothers_failed(status, tmp_path) -> None:
    """The rank that fails, of a job of two, tells the other, which else would wait for the timeout."""
    distributed = pytest.importorskip("torch.distributed")
    store, heard = distributed.HashStore(), []
    ranks = [
        GivenRank(
            rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_addr="h", master_port=1
        )
        for rank in range(2)
    ]

    def run(job, *, environments, aborted, **_) -> Outcome:
        heard.append((environments[0]["RANK"], environments[0]["PLACE"], aborted()))
        return Outcome(status=status)

    for given in ranks:
        job = SimpleNamespace(num_ranks=2)
        run_part(run, given, store, 3, job, {"PLACE": "shared"}, tmp_path / "log", None)
    assert heard == [("0", "shared", False), ("1", "shared", status in ("failed", "oom"))]
    run_part(run, ranks[1], store, 4, job, {"PLACE": "shared"}, tmp_path / "log", None)
    assert heard[-1][2] is False  # the next job is another


def test_the_innermost_function_is_read_from_a_dump(tmp_path) -> None:
    dump = tmp_path / "stack"
    dump.write_text(
        'Current thread 0x7f (most recent first):\n  File "/a/mine.py", line 3 in step\n  File "/c.py", line 1 in f\n'
    )
    assert where(2**22 + 1, dump) == "step (mine.py:3)"
    dump.write_text("")
    assert where(2**22 + 1, dump) == "code that runs no Python"


def test_ranks_meet_at_ports_and_a_name_of_their_own() -> None:
    first, second = local_environments(2)
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert len(set(first["ZEROBENCH_PORTS"].split(","))) == 2
    assert first["ZEROBENCH_RENDEZVOUS"] == second["ZEROBENCH_RENDEZVOUS"]
    assert local_environments(1)[0]["ZEROBENCH_RENDEZVOUS"] != first["ZEROBENCH_RENDEZVOUS"]
    assert [environment["RANK"] for environment in (first, second)] == ["0", "1"]
    assert len(set(free_ports(5))) == 5


@pytest.mark.slow
def test_a_server_that_ends_with_its_job_takes_nothing_with_it() -> None:
    pytest.importorskip("torch")
    with Launcher() as launcher:
        launcher._connect()
        server = launcher._server
        assert server is not None
        server.send_signal(signal.SIGSTOP)  # the message of the end stays unread
        killer = threading.Timer(0.3, server.kill)
        killer.start()
        launcher._end({})
        killer.join()
        assert launcher._connect() is not None and launcher._server is not server
