"""The plan of a cluster: popularity, caches, queues, and the command."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.cluster.plan import LOAD_SPEEDS, SPEEDS, Plan, Profile, profile_of
from benchmarks.cluster.popularity import Zipf, lru_age
from benchmarks.cluster.replicas import BLEND, FULL, PREFIX, _draw, _homes, _Job, _play, _route, _tiers, fit, simulate
from benchmarks.cluster.simulate import DEVICES, MODELS, speed_of
from kvrag import BlendConfig, SettingError
from kvrag.control.cost import Workload, blend_seconds, full_seconds
from kvrag.reuse.select import selecting

PLAN = Plan(chunks=1_000_000, requests=1000)
PROFILE = profile_of("H100", "Llama-3.1-8B", PLAN, 0.15, "query")
GIB = 1 << 30


# ---------------------------------------------------------------- popularity


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.6])
def test_zipf_beyond_the_head_is_the_exact_law(exponent: float) -> None:
    count = 20_000
    exact = np.arange(1, count + 1) ** -exponent
    exact /= exact.sum()
    law = Zipf(count, exponent, head=64)
    np.testing.assert_allclose(law.share(np.arange(1, count + 1)), exact, rtol=1e-4)
    shares, numbers = law.groups(5000)
    assert shares @ numbers == pytest.approx(exact[:5000].sum(), rel=1e-4)
    assert numbers.sum() == pytest.approx(5000)
    ranks = law.sample(np.random.default_rng(0), (200_000,))
    assert (ranks.min(), ranks.max() <= count) == (1, True)
    for last in (1, 60, 100, 3000):
        assert (ranks <= last).mean() == pytest.approx(exact[:last].sum(), abs=0.004)


def test_a_hundred_million_chunks_are_sampled() -> None:
    law = Zipf(100_000_000, 0.85)
    ranks = law.sample(np.random.default_rng(0), (100_000,))
    assert (ranks <= 3_000_000).mean() == pytest.approx(0.57, abs=0.01)
    assert ranks.max() > 90_000_000


@pytest.mark.parametrize(("routing", "replicas"), [("random", 1), ("random", 3), ("rendezvous", 3)])
def test_the_caches_hold_what_least_recently_used_caches_hold(routing: str, replicas: int) -> None:
    """Che's approximation against real caches that see the same requests on the same replicas."""
    plan = replace(PLAN, chunks=5000, chunks_per_prompt=4, stored=0.8, requests=40_000, routing=routing)
    plan = replace(plan, device_gib=20.5 * plan.chunk_bytes / GIB, ram_gib=200.5 * plan.chunk_bytes / GIB)
    plan = replace(plan, disk_gib=1000.5 * plan.chunk_bytes / GIB)
    law = Zipf(plan.chunks, plan.exponent)
    asked = _draw(plan, law)
    assert all(len(set(row)) == 4 for row in asked.ranks[:100].tolist())
    homes = _homes(asked.ranks, replicas)
    where = _route(asked, plan, replicas, homes)
    found = _tiers(asked, plan, replicas, law, homes, where)

    caches = [[OrderedDict[int, None]() for _ in range(3)] for _ in range(replicas)]
    exact = np.zeros(5)
    half = plan.requests // 2  # the first half fills the caches
    for number, (replica, ranks) in enumerate(zip(where.tolist(), asked.ranks.tolist(), strict=True)):
        for rank in ranks:
            tier = next((at for at, cache in enumerate(caches[replica]) if rank in cache), 3 if rank <= 4000 else 4)
            exact[tier] += number >= half
            for cache, size in zip(caches[replica] if rank <= 4000 else (), (20, 200, 1000), strict=False):
                cache[rank] = None
                cache.move_to_end(rank)
                if len(cache) > size:
                    cache.popitem(last=False)
    exact /= exact.sum()
    simulated = np.bincount(found[half:].ravel(), minlength=5) / found[half:].size
    np.testing.assert_allclose(simulated, exact, atol=0.01)
    assert exact.min() > 0.02, "every tier is used"


def test_homes_raise_the_hit_rate_and_no_space_caches_nothing() -> None:
    law = Zipf(10_000, 0.8)
    assert lru_age(law, 10_000, 0) == 0
    assert lru_age(law, 10_000, 10_000) == np.inf
    assert lru_age(law, 10_000, 100, 1 / 4, 4) == pytest.approx(4 * lru_age(law, 10_000, 100), rel=1e-3)
    small = replace(PLAN, chunks=100_000, chunks_per_prompt=2, stored=1.0, ram_gib=50.0, disk_gib=0.0)
    spread, homed = (simulate(replace(small, routing=name), PROFILE, BLEND, 8) for name in ("random", "rendezvous"))
    assert homed.hits["RAM"] > spread.hits["RAM"] + 0.02


def test_a_prompt_has_different_chunks_even_where_one_gets_all_requests() -> None:
    plan = replace(PLAN, exponent=8.0, requests=100)
    ranks = _draw(plan, Zipf(plan.chunks, plan.exponent)).ranks
    assert all(len(set(row)) == plan.chunks_per_prompt for row in ranks.tolist())


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "Llama-3.1-8B", "Qwen2.5-32B"])
def test_an_idle_cluster_takes_the_time_of_the_cost_model(model: str) -> None:
    shape = MODELS[model]
    size = float(shape.bytes_per_token)
    plan = replace(PLAN, rate=0.01, requests=100, stored=1.0, kv_bytes=size, stored_bytes=size, controller="off")
    profile = profile_of("H100", model, plan, 0.15, "query", {"store_latency_s": 0.0})
    speed = speed_of(DEVICES["H100"], shape, 6e9)
    assert simulate(plan, profile, FULL, 2).ttft_s[0] == pytest.approx(full_seconds(speed, plan.prompt_tokens))
    reused = plan.chunks_per_prompt * plan.chunk_tokens
    selects = selecting(BlendConfig(policy="query"), shape.layers)
    for tier, loaded in (("RAM", 0.0), ("disk", reused * size)):
        sizes = {"ram_gib": 1e9, "disk_gib": 0.0} if tier == "RAM" else {"ram_gib": 0.0, "disk_gib": 1e9}
        found = simulate(replace(plan, **sizes), profile, BLEND, 2)
        assert found.hits[tier] == 1
        request = Workload(plan.prompt_tokens, reused, reused, loaded, selects, kept=plan.system_tokens)
        assert found.ttft_s[0] == pytest.approx(blend_seconds(speed, request, 0.15), rel=0.15)


def test_a_queue_is_as_long_as_theory_says() -> None:
    """Pollaczek and Khinchine's formula for random arrivals and constant service."""
    rng, service, busy = np.random.default_rng(1), 0.2, 0.7
    arrivals = rng.exponential(service / busy, 40_000).cumsum().tolist()
    jobs = [_Job(number, at, 0, service) for number, at in enumerate(arrivals)]
    _play(jobs, 1, PROFILE, 1)
    waited = np.mean([job.first - job.arrival for job in jobs]) - service
    assert waited == pytest.approx(busy * service / (2 * (1 - busy)), rel=0.05)


def test_answers_share_steps_and_prefills_come_between() -> None:
    profile = replace(PROFILE, decode_step_s=1.0, decode_answer_s=0.0)
    jobs = [_Job(0, 0.0, 0, 10.0), _Job(1, 0.0, 1, 5.0), _Job(2, 13.5, 0, 10.0)]
    _play(jobs, 2, profile, 8)
    # a prefill to 10, steps to 14, a prefill to 24, then both answers get a token per step
    assert [job.first for job in jobs] == [10.0, 5.0, 24.0]
    assert [job.last for job in jobs] == [27.0, 12.0, 31.0]


def test_loads_wait_for_each_other_and_overlap_with_blending() -> None:
    profile = replace(PROFILE, disk_bytes_per_s=1.0, store_bytes_per_s=2.0, store_total_bytes_per_s=4.0)
    profile = replace(profile, overlap=0.5, store_latency_s=1.0)
    jobs = [_Job(0, 0.0, 0, 4.0, 10.0), _Job(1, 0.0, 0, 4.0, 10.0), _Job(2, 0.0, 1, 4.0, 0.0, 12.0)]
    jobs += [_Job(3, 0.0, 2, 4.0, 0.0, 12.0), _Job(4, 0.0, 3, 4.0, 1.0)]
    _play(jobs, 4, profile, 1)
    # 10 s of loading, 2 of them hidden; 20 s; a network of 2 bytes/s; the store serves 4 bytes/s to all
    assert [job.first for job in jobs] == [12.0, 22.0, 9.0, 9.0, 4.0]


def test_the_same_seed_gives_the_same_result() -> None:
    first, again = (simulate(PLAN, PROFILE, BLEND, 16) for _ in range(2))
    assert first == again
    assert simulate(replace(PLAN, seed=1), PROFILE, BLEND, 16) != first


# ---------------------------------------------------------------- what is needed, what it costs


def test_fewer_replicas_would_miss_the_target() -> None:
    for system in (BLEND, PREFIX, FULL):
        found = fit(PLAN, PROFILE, system)
        assert found is not None
        assert found.ttft_s[1] <= PLAN.target_s
        fewer = simulate(PLAN, PROFILE, system, found.replicas - 1)
        assert fewer.ttft_s[1] > PLAN.target_s or fewer.busy > 0.9
    assert fit(replace(PLAN, target_s=0.01), PROFILE, FULL) is None


def test_costs() -> None:
    plan = replace(PLAN, rate=10.0, stored=0.5, gpu_hour=3.6, gpus_per_replica=2, ram_gib=0, disk_gib=0)
    plan = replace(plan, controller="off")
    found = simulate(plan, PROFILE, BLEND, 5)
    assert found.gpus == 10
    assert found.gpu_cost == pytest.approx(10 * 0.001 * 100)  # a GPU second costs 0.001, 1,000 requests take 100 s
    assert found.store_cost == pytest.approx(500_000 * 2**26 / 1e9 * 0.023 / (730 * 3600) * 100)
    assert found.read_cost == pytest.approx(found.hits["store"] * 10 * 16 * 0.0004)  # 64 MiB are 16 reads
    assert simulate(plan, PROFILE, PREFIX, 5).store_cost == 0


def test_prefix_caching_reuses_the_system_prompt_and_a_recent_first_chunk() -> None:
    few, many = (simulate(replace(PLAN, prefix_gib=gib), PROFILE, PREFIX, 30).reused for gib in (0.0, 4000.0))
    assert few == pytest.approx(256 / 5440)
    assert few < many < (256 + 512) / 5440


@pytest.mark.usefixtures("not_by_the_clock")
def test_the_controller_chooses_full_prefill_where_loading_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.tuning.NOTICEABLE_S", 0.01)  # as installed
    slow = replace(PROFILE, store_bytes_per_s=1e8)
    plan = replace(PLAN, stored=1.0, ram_gib=0.0, disk_gib=0.0)
    assert simulate(plan, slow, BLEND, 40).full == 1
    off = simulate(replace(plan, controller="off"), slow, BLEND, 40)
    assert off.full == 0
    assert off.ttft_s[0] > 5


# ---------------------------------------------------------------- the command

SMALL = ["cluster", "--chunks", "1000000", "--requests", "400"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--brief"]) == 0
    out = capsys.readouterr().out
    assert out.count("**assumed, unmeasured**") == len(SPEEDS)
    assert "| kvrag | " in out
    assert "Decisions" not in out
    assert main([*SMALL, "--json", "--replicas", "20"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["systems"]) == {BLEND, PREFIX, FULL}
    assert {each["replicas"] for each in result["systems"].values()} == {20}
    assert result["plan"]["stored_bytes"] == pytest.approx(131072 / 1.95, rel=0.01)  # int8
    names = [name.rpartition(" x ")[0] for name in result["sensitivity"]]
    assert all(names.count(name) == 2 for name in names)
    assert len(names) == 26


def test_nothing_stored_is_prefix_caching(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--stored", "0", "--replicas", "20", "--brief", "--json", "--routing", "rendezvous"]) == 0
    assert json.loads(capsys.readouterr().out)["systems"][BLEND]["hits"]["computed"] == 1


def test_a_target_out_of_reach_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--target-s", "0.01", "--brief"]) == 0
    assert capsys.readouterr().out.count("out of reach") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stored", "1.5"], "the stored share of the corpus must be from 0 to 1"),
        (["--chunks", "10"], "a corpus of 10 chunks is too small for 10 per prompt"),
        (["--model", "Llama-3.1-70B"], "use more --gpus-per-replica"),
        (["--profile", "{bad}"], "is not a profile"),
        (["--profile", "{bad}", "--calibrate", "x.json"], "give one of them"),
        (["--profile", "{bad}", "--ratio", "0.3"], "leave them out with --profile"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text('{"prefill_tokens_per_s": -1}')
    given = [argument.format(bad=tmp_path / "bad.json") for argument in arguments]
    assert main(["cluster", *given]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_profile_is_read_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = replace(PROFILE, measured=("blend_share", "disk_bytes_per_s"))
    profile.write(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == profile
    given = ["--profile", str(tmp_path / "p.json"), "--disk-gb-s", "3", "--store-latency-ms", "5"]
    assert main([*SMALL, *given, "--replicas", "20", "--brief", "--json"]) == 0
    used = json.loads(capsys.readouterr().out)["profile"]
    assert (used["disk_bytes_per_s"], used["store_latency_s"]) == (3e9, 0.005)
    assert used["blend_share"] == profile.blend_share
    assert used["measured"] == ["blend_share"], "values of options were not measured"
    with pytest.raises(SettingError, match="blend_share must be a positive number"):
        replace(PROFILE, blend_share=0.0)


def test_calibrate_measures_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    request = ["--chunks-per-prompt", "2", "--chunk-tokens", "30", "--system-tokens", "0", "--question-tokens", "8"]
    arguments = ["--model", "reader", "--calibrate", str(file), *request, "--replicas", "1", "--rate", "0.5"]
    assert main([*SMALL, *arguments, "--brief", "--json"]) == 0
    profile = Profile.read(file)
    assert json.loads(capsys.readouterr().out)["profile"]["measured"] == list(profile.measured)
    assert set(SPEEDS) - set(profile.measured) == {"overlap", *LOAD_SPEEDS} - {"disk_bytes_per_s"}
    assert 1 < profile.prefill_tokens_per_s < 1e6
    assert "reader" in profile.source
