"""Requests that sit out of iterations, under random traffic, and in the engine while their masks are late."""

import os
import sys
import threading

import pytest
from hypothesis import settings
from test_scheduler_properties import SchedulerMachine, draw

from jaxllm import LLM, SamplingParams
from jaxllm.sampling import token_masks
from jaxllm.sampling.grammar_processes import MOST
from jaxllm.sampling.token_masks import MaskThreads
from jaxllm.types import RequestStatus


class SittingOutMachine(SchedulerMachine):
    """Some of those who decode sit out of each iteration, as the engine lets them: with nothing in flight."""

    sitting_out = frozenset()

    def _step(self):
        self.run_ahead = 0
        if self.scheduler.lets_sit_out:
            running = self.scheduler._state.running
            late = {one.request_id for one in running if draw(self.now, one.arrival_index + 1, 4) == 0}
            before = [self.live[name] for name in self.sitting_out if name in self.live]
            late |= {one.request_id for one in before if draw(self.now, one.arrival_index, 3)}
            self.sitting_out = late
            self.scheduler.sit_out(self.sitting_out)
        super()._step()

    def _check_decision(self, output, before):
        if not self.sitting_out:
            super()._check_decision(output, before)
            return
        computed = {*output.decode, *(chunk.request for chunk in output.prefill)}
        assert not {one.request_id for one in computed} & self.sitting_out
        self._check_swaps(output, before)
        others = [one for one in before if one.request_id not in self.sitting_out]
        able = [one for one in others if before[one][2] is RequestStatus.RUNNING and one.num_in_flight == 0]
        decoding = [one for one in able if one.num_computed_tokens == one.num_tokens - 1]
        assert computed or output.preempted or not decoding, "nobody computes, though somebody could"


TestSittingOut = SittingOutMachine.TestCase
TestSittingOut.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_a_late_mask_holds_back_its_own_request_alone(monkeypatch):
    """Whose mask is late waits for it; a free request and another grammar's end meanwhile."""
    may_end, fill, late = threading.Event(), MaskThreads._fill, []

    def wait_for_others(self, states, *arguments):
        if any(state in late for state in states):
            may_end.wait()
        fill(self, states, *arguments)

    with LLM(max_num_seqs=4, max_model_len=128, block_size=16, num_gpu_blocks_override=40) as llm:
        engine = llm.engine
        params = {
            "slow": SamplingParams(max_tokens=12, seed=1, structured_outputs={"regex": "[a-z ]{20}"}),
            "quick": SamplingParams(max_tokens=12, seed=2, structured_outputs={"regex": "[0-9 ]{20}"}),
            "free": SamplingParams(max_tokens=30, seed=3, ignore_eos=True),
        }
        alone = {}
        for name, one in params.items():
            engine.add_request(name, "The cat", one)
            (alone[name],) = [output for output in _run(engine) if output.finished]
        monkeypatch.setattr(MaskThreads, "_fill", wait_for_others)
        # A busy machine makes others late as well; behind the slow one they would wait for it.
        monkeypatch.setattr(token_masks, "_num_checks", lambda before, *_: max(0, before - 1))
        try:
            for name, one in params.items():
                engine.add_request(name, "The cat", one)
            late.append(engine.loop.states["slow"].request.token_mask.grammar)
            late[0].num_checks = 1000
            engine.loop.states["quick"].request.token_mask.grammar.num_checks = 0
            ended = {}
            while len(ended) < 2:
                ended |= {output.request_id: output for output in engine.step() if output.finished}
                engine.scheduler.check()
            assert ended.keys() == {"quick", "free"}
            assert len(engine.loop.states["slow"].request.output_token_ids) == 1
        finally:  # its thread is the process's
            may_end.set()
        ended |= {output.request_id: output for output in _run(engine) if output.finished}
        for name, output in ended.items():
            assert output.outputs[0].token_ids == alone[name].outputs[0].token_ids


def test_what_others_have_sampled_does_not_wait_for_a_late_mask(monkeypatch):
    """An engine that waits for masks alone has sent before what it knew."""
    may_end, fill, wait, held = threading.Event(), MaskThreads._fill, MaskThreads.wait, []

    def wait_for_others(self, states, *arguments):
        if any(state.num_checks > 100 for state in states):
            may_end.wait()
        fill(self, states, *arguments)

    with LLM(max_num_seqs=4, max_model_len=128, block_size=16, num_gpu_blocks_override=40) as llm:
        engine = llm.engine

        def note(self, states, seconds):
            held.append(len(engine.loop.outbox._deltas))
            wait(self, states, min(seconds, 0.01))

        slow = SamplingParams(max_tokens=4, seed=1, structured_outputs={"regex": "[a-z ]{20}"})
        engine.add_request("before", "The cat", slow)
        assert [output.finished for output in _run(engine)] == [True]  # its programs are compiled
        monkeypatch.setattr(MaskThreads, "_fill", wait_for_others)
        monkeypatch.setattr(MaskThreads, "wait", note)
        try:
            engine.add_request("slow", "The cat", slow)
            engine.add_request("free", "The cat", SamplingParams(max_tokens=8, seed=3, ignore_eos=True))
            engine.loop.states["slow"].request.token_mask.grammar.num_checks = 1000
            ended = []
            while not (ended and held):
                ended += [output.request_id for output in engine.step() if output.finished]
            assert ended == ["free"]
        finally:
            may_end.set()
        assert "slow" in [output.request_id for output in _run(engine) if output.finished]
    assert not any(held)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_who_makes_slow_masks_lets_others_go_first():
    """Also the threads of the library that does."""
    before = _niceness()
    threads = MaskThreads()
    made = [nice for thread, nice in _niceness().items() if thread not in before]
    assert sum(nice > before[str(os.getpid())] for nice in made) == 2 * MOST
    threads._quick.close()
    threads._slow.close()


def _niceness():
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/stat") as file:
            found[thread] = int(file.read().rpartition(")")[2].split()[16])
    return found


def _run(engine):
    while engine.has_unfinished_requests:
        yield from engine.step()
