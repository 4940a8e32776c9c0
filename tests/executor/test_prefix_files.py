"""The prefix cache in files: it outlives engines, and nothing that happens to the files changes a token."""

import dataclasses
import pathlib
import random
import threading

import pytest
from engine_helpers import make_engine, make_llm, run
from scheduler_helpers import LinearCosts, describe, make_request, make_scheduler, pools, take
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, UserCodeError
from jaxllm.executor.kv import file_io
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.sched.policies import NoOffload, OffloadIfCheaper
from jaxllm.sched.presets import make_preset
from jaxllm.types import CopyProgress

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [3 + i % 50 for i in range(60)]


# Schedulers


def with_files(files, **changes):
    settings = {"num_gpu_blocks": 6, "num_host_blocks": 8, "enable_prefix_caching": True} | changes
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=NoOffload())
    return make_scheduler(policy, files=files, **settings)


def names_of(request):
    """Names of its full blocks, as another scheduler gives them."""
    other = with_files({})
    return other._state.lookups.learn_names(request, request.num_tokens)


def test_who_finds_blocks_in_files_waits_for_them():
    request = make_request(0, 14, 2)
    scheduler = with_files(set(names_of(make_request(0, 12))))
    scheduler.add(request)
    assert scheduler.schedule(0.0).is_empty
    (read,) = scheduler.take_reads()
    assert (len(read.names), scheduler.num_available_host_blocks) == (3, 5)
    assert scheduler.schedule(0.0).is_empty
    assert scheduler.take_reads() == []
    scheduler.check()
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True, True, True])]))
    assert describe(output) == "| r0[12:14]! >r0"
    assert (request.num_cached_tokens, request.num_disk_cached_tokens) == (12, 12)
    take(scheduler, output)
    scheduler.check()


def test_what_turns_out_to_be_missing_is_computed():
    scheduler = with_files(set(names_of(make_request(0, 12))))
    scheduler.add(make_request(0, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True, False, True])]))
    assert describe(output) == "| r0[4:14]! >r0"
    scheduler.check()


def test_several_wait_for_one_read():
    scheduler = with_files(set(names_of(make_request(0, 12))))
    for index in range(2):
        scheduler.add(make_request(index, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True] * 3)]))
    assert describe(output) == "| r0[12:14]! r1[12:14]! >r0"


def test_a_reset_lets_nothing_be_found_that_is_on_its_way():
    scheduler = with_files(set(names_of(make_request(0, 12))))
    scheduler.add(make_request(0, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    scheduler.reset_prefix_cache()
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True] * 3)]))
    assert describe(output) == "| r0[0:14]!"
    scheduler.check()


def test_files_need_a_cache_and_host_memory():
    for changes in ({"num_host_blocks": 0}, {"enable_prefix_caching": False}):
        with pytest.raises(ConfigError, match="files of the prefix cache need"):
            with_files({}, **changes)


def test_who_ends_meanwhile_leaves_nothing_behind_and_may_come_again():
    scheduler = with_files(set(names_of(make_request(0, 12))))
    first = make_request(0, 14, 2)
    scheduler.add(first)
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    scheduler.finish(first, "abort")
    assert not scheduler._state.awaited
    assert scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [False] * 3)])).is_empty
    scheduler.add(make_request(0, 14, 2))  # of the same id
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True] * 3)]))
    assert describe(output) == "| r0[12:14]! >r0"
    assert not scheduler._state.num_read
    assert scheduler.num_available_host_blocks == 5


def test_as_many_are_read_ahead_as_may_start():
    requests = [
        make_request(index, 14, 2, prompt_token_ids=range(20 * index, 20 * index + 14)) for index in range(6)
    ]
    files = {name for request in requests for name in names_of(request)}
    scheduler = with_files(files, num_gpu_blocks=64, num_host_blocks=64)
    for request in requests:
        scheduler.add(request)
    assert scheduler.schedule(0.0).is_empty
    reads = scheduler.take_reads()
    assert len(reads) == 6
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True] * 3) for read in reads]))
    assert len(output.prefill) == 6
    assert {request.num_disk_cached_tokens for request in requests} == {12}


def test_a_read_takes_no_room_of_what_it_follows():
    scheduler = with_files({}, num_gpu_blocks=12, num_host_blocks=6)
    long = make_request(0, 34, 2)
    names = names_of(long)
    places = scheduler._state.host.store(names[:4])
    scheduler._state.host.release(places)
    scheduler._files.update(dict.fromkeys(names[4:]))
    scheduler.add(long)
    assert scheduler.schedule(0.0).is_empty
    (read,) = scheduler.take_reads()
    assert read.names == tuple(names[4:6])
    scheduler.check()
    scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True, True])]))
    assert long.num_cached_tokens == 24


class Impatient(NoOffload):
    """Waits for no more than a number of seconds; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def reads(self, num_blocks, seconds, state):
        self.asked.append((num_blocks, seconds))
        return seconds <= 3.0


def impatient_scheduler(files, offload):
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=offload)
    settings = {"num_gpu_blocks": 12, "num_host_blocks": 8, "enable_prefix_caching": True}
    return make_scheduler(policy, files=files, **settings)


def test_a_policy_says_what_it_is_worth_to_wait_for():
    scheduler = impatient_scheduler(set(names_of(make_request(0, 12))), offload := Impatient())
    scheduler.add(first := make_request(0, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    take(scheduler, scheduler.schedule(6.0, CopyProgress(read=[(read.handle, [True] * 3)])))
    assert first.num_disk_cached_tokens == 12
    while scheduler.has_unfinished:
        take(scheduler, scheduler.schedule(6.0))
    scheduler.reset_prefix_cache()
    scheduler.add(again := make_request(1, 14, 2))
    assert describe(scheduler.schedule(7.0)) == "| r1[0:14]!"
    assert (scheduler.take_reads(), again.num_cached_tokens) == ([], 0)
    assert offload.asked == [(3, 0.0), (3, 6.0)]
    scheduler.check()


def test_a_disk_that_hung_once_is_read_again():
    scheduler = impatient_scheduler(set(names_of(make_request(0, 12))), offload := Impatient())
    scheduler.add(make_request(0, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    take(scheduler, scheduler.schedule(60.0, CopyProgress(read=[(read.handle, [False] * 3)])))  # given up
    while scheduler.has_unfinished:
        take(scheduler, scheduler.schedule(60.0))
    scheduler.reset_prefix_cache()
    scheduler.add(make_request(1, 14, 2))
    assert scheduler.schedule(61.0).is_empty
    assert [len(read.names) for read in scheduler.take_reads()] == [3]
    assert offload.asked == [(3, 0.0)] * 2


def test_who_is_not_to_wait_for_the_rest_still_waits_for_what_is_coming():
    names = names_of(make_request(0, 20))
    scheduler = impatient_scheduler(files=set(names), offload=(offload := Impatient()))
    scheduler.add(make_request(0, 14, 2))
    scheduler.schedule(0.0)
    (read,) = scheduler.take_reads()
    scheduler._read_ahead._block_seconds = 10.0
    scheduler.add(second := make_request(1, 22, 2))
    assert scheduler.schedule(1.0).is_empty
    assert scheduler.take_reads() == []
    assert offload.asked[-1] == (2, 50.0)
    output = scheduler.schedule(2.0, CopyProgress(read=[(read.handle, [True] * 3)]))
    assert "r1[12:22]!" in describe(output)
    assert second.num_cached_tokens == 12
    scheduler.check()


def test_what_a_policy_raises_loses_no_read():
    class Raising(NoOffload):
        num_asked = 0

        def reads(self, num_blocks, seconds, state):
            self.num_asked += 1
            if self.num_asked == 2:
                raise ValueError("no")
            return True

    first = make_request(0, 14, 2)
    second = make_request(1, 14, 2, prompt_token_ids=range(100, 114))
    files = {*names_of(make_request(0, 12)), *names_of(make_request(1, 12, prompt_token_ids=range(100, 112)))}
    scheduler = impatient_scheduler(files=files, offload=Raising())
    for request in (first, second):
        scheduler.add(request)
    with pytest.raises(UserCodeError, match=r"Raising\.reads raised ValueError: no"):
        scheduler.schedule(0.0)
    assert scheduler.is_planning  # an engine goes on
    scheduler.check()
    scheduler.schedule(0.0)
    reads = scheduler.take_reads()
    assert [len(read.names) for read in reads] == [3, 3]
    ended = [(read.handle, [True] * 3) for read in reads]
    assert describe(scheduler.schedule(0.0, CopyProgress(read=ended))) == "| r0[12:14]! r1[12:14]! >r0 >r1"
    scheduler.check()


def test_reading_is_weighed_against_computing():
    policy = OffloadIfCheaper(LinearCosts(prefill=1.0, swap=0.5))
    assert policy.reads(2, 6.9, pools())  # 8 tokens, and 1 s for the copy
    assert not policy.reads(2, 7.1, pools())
    assert policy.reads(2, 22.9, pools(num_running=2))  # whose steps get 8 s longer, in pieces
    assert not policy.reads(2, 23.1, pools(num_running=2))


# Engines


def keeping(folder, name="llama_gqa", **changes):
    settings = {"enable_prefix_caching": None, "num_host_blocks": 80, "prefix_cache_dir": str(folder)}
    return make_llm(golden_checkpoint(name), **(settings | changes))


def generate(llm, prompt=PROMPT):
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0]


def files_below(folder):
    return [path for path in pathlib.Path(folder).rglob("*") if path.is_file() and path.name != "about.json"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with the blocks of an engine that has ended, and the tokens it made."""
    folder = tmp_path_factory.mktemp("kept")
    llm = keeping(folder)
    tokens = generate(llm).token_ids
    generate(llm, [9] * 4)  # by whose iterations the last blocks are copied
    llm.executor.flush_files()
    return folder, tokens


def test_a_new_engine_finds_what_another_has_kept(kept):
    folder, tokens = kept
    llm = keeping(folder)
    output = generate(llm)
    assert output.token_ids == tokens == run(make_engine(llm), [PROMPT], GREEDY)[0].token_ids
    assert output.cached_tokens_by_tier == {"device": 0, "host": 0, "disk": 56}  # of 60, the last is computed
    assert generate(llm).cached_tokens_by_tier == {"device": 56, "host": 0, "disk": 0}


def test_damaged_files_change_no_token(kept, tmp_path, caplog):
    folder, tokens = kept
    rng, paths = random.Random(0), files_below(folder)
    damaged = []
    for path in paths:
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            damaged.append(target)
        target.write_bytes(content)
    assert damaged
    llm = keeping(tmp_path)
    output = generate(llm)
    assert output.token_ids == tokens
    assert output.num_disk_cached_tokens < 56
    assert "is not used" in caplog.text
    assert {path.name for path in paths} <= {path.name for path in files_below(tmp_path)} | {
        path.name for path in damaged
    }


def test_what_is_under_way_ends_with_the_last_request(kept):
    llm = keeping(kept[0])
    engine = llm.engine
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    assert engine.scheduler.is_reading
    engine.abort("a")
    assert engine.has_unfinished_requests
    while engine.has_unfinished_requests:
        engine.step()
    engine.scheduler.check()
    assert not engine.scheduler.is_reading
    assert not llm.executor.copies().read
    assert engine.scheduler.num_available_host_blocks == 60  # a quarter is for what is being written
    engine.add_request("b", PROMPT, GREEDY)
    while engine.has_unfinished_requests:
        engine.step()


def test_what_keys_depend_on_tells_files_apart(tmp_path):
    short = {"hf_overrides": {"max_position_embeddings": 64}}
    for changes in (
        {"max_model_len": 112, "block_size": 8},
        {"max_model_len": 128, "block_size": 8},  # which frequencies of this rope depend on
        {"max_model_len": 128, "block_size": 4},
    ):
        llm = keeping(tmp_path, "llama_dynamic", **short, **changes)
        assert generate(llm).num_cached_tokens == 0
        llm.executor.flush_files()


def test_other_weights_find_nothing(kept):
    folder, _ = kept
    llm = keeping(folder, "llama_mlp_bias")
    assert generate(llm).num_cached_tokens == 0


def test_a_folder_has_conditions(tmp_path):
    for changes, message in (
        ({"num_host_blocks": 0}, "needs the prefix cache and host memory"),
        ({"num_host_blocks": 1}, "needs the prefix cache and host memory of two blocks or more"),
        ({"enable_prefix_caching": False}, "needs the prefix cache and host memory"),
        ({"load_format": "dummy"}, "cannot keep blocks of load_format"),
        ({"prefix_cache_dir_bytes": 0}, "prefix_cache_dir_bytes=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            keeping(tmp_path, **changes)


def test_a_disk_that_hangs_costs_a_computation(kept, monkeypatch):
    folder, tokens = kept
    monkeypatch.setattr(file_io, "PATIENCE_SECONDS", 0.05)
    gate = threading.Event()
    read = BlockFiles.read
    monkeypatch.setattr(BlockFiles, "read", lambda self, name: gate.wait() and read(self, name))
    llm = keeping(folder)
    output = generate(llm)
    assert output.token_ids == tokens
    assert output.num_cached_tokens == 0
    gate.set()
    llm.close()


def test_all_that_is_full_reaches_files_whatever_the_host_holds(tmp_path):
    prompts = [[3 + (i + index) % 50 for i in range(60)] for index in range(6)]
    with keeping(tmp_path, num_host_blocks=8) as llm:
        for prompt in prompts:  # alone: there is no room to read more ahead
            generate(llm, prompt)
    assert len(files_below(tmp_path)) >= 6 * 15
    assert len({path.name for path in files_below(tmp_path)}) == len(files_below(tmp_path))
