"""Metrics: exact figures of small cases, under both sets of names, as Prometheus reads them."""

import os
import shutil
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from manager_helpers import admit, grow, make_manager
from prometheus_client.parser import text_string_to_metric_families as parse

from paged import CacheConfig, Scheduler, SchedulerConfig, Sequence, SequenceGroup
from paged.metrics import SECONDS, Metrics

PROMTOOL = shutil.which(
    "promtool", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


def figures(text):
    """Sample -> value, labels in the key: {"paged_cache_used_ratio cpu": 0.0}; no buckets."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in parse(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def promtool(text):
    """What Debian's promtool says of a page of metrics."""
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def make_scheduler(num_gpu_blocks, *, num_cpu_blocks=0, **options):
    manager = make_manager(num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
    return Scheduler(SchedulerConfig(**options), manager)


def add(scheduler, request_id, tokens, n=1):
    seqs = [Sequence((request_id, k), tokens) for k in range(n)]
    scheduler.add(SequenceGroup(request_id, seqs))


def crowded(**options):
    """Two sequences in four blocks that need a third each: one had to go. Two have never come in."""
    scheduler = make_scheduler(4, num_cpu_blocks=4, **options)
    add(scheduler, "a", range(10, 17))
    add(scheduler, "b", range(20, 27))
    add(scheduler, "c", range(30, 35), 2)
    for token in (1, 2):
        output = scheduler.schedule()
        scheduler.update(output, {seq.seq_id: token for seq in output.seqs})
    scheduler.schedule()
    return scheduler


def make_engine(metrics=None):
    """A tiny model with room for all that comes."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    from paged.engine import Engine

    cache = CacheConfig(block_size=4, num_gpu_blocks=32, num_cpu_blocks=8)
    return Engine(tiny_model("llama"), cache_config=cache, metrics=metrics)


def generate(engine):
    """Three requests, one of them for two sequences: 7 + 5 + 6 tokens in, 4 each out."""
    from paged.engine import SamplingParams

    params = [
        SamplingParams(max_tokens=4, temperature=1.0, seed=0, ignore_eos=True, n=n)
        for n in (1, 2, 1)
    ]
    engine.generate([[10 + i for i in range(7)], [3] * 5, [4] * 6], params)


# A manager


def test_a_manager_alone_shows_its_pools_and_its_prefix_cache():
    manager = make_manager(8, num_cpu_blocks=4)
    metrics = Metrics(manager)
    assert figures(metrics.text()) == {
        "paged_cache_used_ratio gpu": 0.0,
        "paged_cache_used_ratio cpu": 0.0,
        "paged_cache_cached_ratio gpu": 0.0,
        "paged_cache_cached_ratio cpu": 0.0,
        "paged_internal_fragmentation_ratio": 0.0,
        "paged_prefix_queried_tokens_total": 0.0,
        "paged_prefix_hit_tokens_total": 0.0,
    }
    gone = admit(manager, "gone", range(10))
    manager.free(gone)  # two full blocks stay cached
    admit(manager, "a", range(7))  # finds the first of them
    moved = admit(manager, "b", range(50, 54))
    manager.swap_out(moved)  # its block stays cached
    assert figures(metrics.text()) == {
        "paged_cache_used_ratio gpu": 2 / 8,
        "paged_cache_used_ratio cpu": 1 / 4,
        "paged_cache_cached_ratio gpu": 2 / 8,
        "paged_cache_cached_ratio cpu": 0.0,
        "paged_internal_fragmentation_ratio": 1 / 8,
        "paged_prefix_queried_tokens_total": 10 + 7 + 4,
        "paged_prefix_hit_tokens_total": 4.0,
    }


def test_vllms_names_show_the_same_manager():
    manager = make_manager(8, num_cpu_blocks=4)
    manager.swap_out(admit(manager, "b", range(4)))
    admit(manager, "a", range(7))
    assert figures(Metrics(manager).text("vllm")) == {
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_percent": 25.0,
        "vllm:cpu_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 11.0,
        "vllm:prefix_cache_hits_total": 4.0,
    }


def test_a_pool_without_blocks_is_not_used():
    values = figures(Metrics(make_manager(1)).text())
    assert values["paged_cache_used_ratio cpu"] == values["paged_cache_cached_ratio cpu"] == 0.0


# A scheduler


def test_a_scheduler_without_requests_shows_zeros():
    values = figures(Metrics(make_scheduler(4)).text())
    assert len(values) == 7 + 4 + 2 + 2 + 2 * 2
    assert set(values.values()) == {0.0}


def test_a_crowded_pool_by_our_names():
    values = figures(Metrics(crowded()).text())
    assert values == {
        "paged_cache_used_ratio gpu": 3 / 4,
        "paged_cache_used_ratio cpu": 2 / 4,
        "paged_cache_cached_ratio gpu": 1 / 4,
        "paged_cache_cached_ratio cpu": 0.0,
        "paged_internal_fragmentation_ratio": 3 / 12,
        "paged_prefix_queried_tokens_total": 14.0,
        "paged_prefix_hit_tokens_total": 0.0,
        "paged_sequences_running": 1.0,
        "paged_sequences_waiting": 2.0,
        "paged_sequences_swapped": 1.0,
        "paged_sequences_waiting_for_blocks": 3.0,
        "paged_preemptions_total swap": 1.0,
        "paged_preemptions_total recompute": 0.0,
        "paged_prompt_tokens_total": 14.0,
        "paged_generation_tokens_total": 4.0,
        "paged_time_to_first_token_seconds_count": 0.0,
        "paged_time_to_first_token_seconds_sum": 0.0,
        "paged_time_per_output_token_seconds_count": 0.0,
        "paged_time_per_output_token_seconds_sum": 0.0,
    }


def test_a_crowded_pool_by_vllms_names_counts_requests():
    metrics = Metrics(crowded())
    metrics.on_first_token(0.5)
    metrics.on_finish(3.0, 4)
    assert figures(metrics.text("vllm")) == {
        "vllm:gpu_cache_usage_perc": 0.75,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:gpu_cache_usage_percent": 75.0,
        "vllm:cpu_cache_usage_perc": 0.5,
        "vllm:num_requests_running": 1.0,
        "vllm:num_requests_waiting": 1.0,
        "vllm:num_requests_swapped": 1.0,
        "vllm:num_blocks_waiting": 3.0,
        "vllm:num_preemptions_total": 1.0,
        "vllm:prefix_cache_queries_total": 14.0,
        "vllm:prefix_cache_hits_total": 0.0,
        "vllm:prompt_tokens_total": 14.0,
        "vllm:generation_tokens_total": 4.0,
        "vllm:time_to_first_token_seconds_count": 1.0,
        "vllm:time_to_first_token_seconds_sum": 0.5,
        "vllm:time_per_output_token_seconds_count": 3.0,
        "vllm:time_per_output_token_seconds_sum": 3.0,
        "vllm:inter_token_latency_seconds_count": 3.0,
        "vllm:inter_token_latency_seconds_sum": 3.0,
    }


def test_a_group_that_is_computed_again_waits():
    values = figures(Metrics(crowded(preemption="recompute")).text())
    assert values["paged_preemptions_total recompute"] == 1.0
    assert values["paged_preemptions_total swap"] == 0.0
    assert values["paged_sequences_waiting"] == values["paged_sequences_waiting_for_blocks"] == 3.0
    assert values["paged_sequences_swapped"] == values["paged_cache_used_ratio cpu"] == 0.0


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 4}], ids=["seats", "budget"]
)
def test_who_waits_for_a_seat_or_the_budget_does_not_wait_for_blocks(options):
    scheduler = make_scheduler(100, **options)
    add(scheduler, "a", [1, 2, 3, 4])
    add(scheduler, "b", [5, 6, 7, 8])
    scheduler.schedule()
    values = figures(Metrics(scheduler).text())
    assert values["paged_sequences_running"] == values["paged_sequences_waiting"] == 1.0
    assert values["paged_sequences_waiting_for_blocks"] == 0.0


def test_nobody_waits_for_blocks_when_the_crowd_is_gone():
    scheduler = crowded()
    for request_id in "abc":
        scheduler.abort(request_id)
    values = figures(Metrics(scheduler).text())
    assert not any(value for name, value in values.items() if "sequences" in name)
    assert values["paged_preemptions_total swap"] == 1.0  # a counter never falls


# Durations


def test_histograms_count_each_later_token_with_its_sequences_mean():
    metrics = Metrics(make_scheduler(4))
    metrics.on_first_token(0.001)  # a bound belongs to its bucket
    metrics.on_first_token(0.3)
    metrics.on_first_token(10_000.0)
    metrics.on_finish(1.2, 5)
    metrics.on_finish(0.0, 1)  # has no token after its first
    families = {family.name: family for family in parse(metrics.text())}

    def buckets(name):
        return {
            sample.labels["le"]: sample.value
            for sample in families[name].samples
            if sample.name.endswith("_bucket")
        }

    first = buckets("paged_time_to_first_token_seconds")
    assert list(first) == [*map(str, SECONDS), "+Inf"]
    assert [first[bound] for bound in ("0.001", "0.25", "0.5", "500.0", "+Inf")] == [1, 1, 2, 2, 3]
    later = buckets("paged_time_per_output_token_seconds")
    assert [later[bound] for bound in ("0.25", "0.5", "+Inf")] == [0, 4, 4]
    values = figures(metrics.text())
    assert values["paged_time_per_output_token_seconds_sum"] == pytest.approx(1.2)
    assert values["paged_time_to_first_token_seconds_sum"] == pytest.approx(10_000.301)


# An engine


def test_an_engine_gives_its_scheduler():
    scheduler = crowded()
    metrics = Metrics()
    assert metrics.text() == metrics.text("vllm") == ""
    metrics.watch(SimpleNamespace(scheduler=scheduler))
    assert figures(metrics.text()) == figures(Metrics(scheduler).text())


def test_an_engine_tells_of_tokens_and_times():
    metrics = Metrics()
    generate(make_engine(metrics))
    values = figures(metrics.text())
    assert values["paged_prompt_tokens_total"] == 7 + 5 + 6
    assert values["paged_generation_tokens_total"] == 4 * 4
    assert values["paged_time_to_first_token_seconds_count"] == 3
    assert values["paged_time_per_output_token_seconds_count"] == 4 * 3
    first, later = (
        values[f"paged_time_{name}_token_seconds_sum"] for name in ("to_first", "per_output")
    )
    assert 0 < first < 60 and 0 < later < 60
    assert values["paged_sequences_running"] == values["paged_cache_used_ratio gpu"] == 0
    assert values["paged_cache_cached_ratio gpu"] > 0


def test_two_engines_are_counted_apart():
    busy, idle = Metrics(), Metrics()
    generate(make_engine(busy))
    make_engine(idle)
    assert figures(busy.text("vllm"))["vllm:generation_tokens_total"] == 16
    assert set(figures(idle.text("vllm")).values()) == {0.0}


# Two at once, labels, threads


def test_two_sources_are_told_apart_by_labels():
    small, large = make_manager(2), make_manager(8)
    admit(small, "a", [1])
    pages = [
        Metrics(manager, labels={"model_name": name}).text()
        for name, manager in (("small", small), ("large", large))
    ]
    values = figures("".join(pages))
    assert values["paged_cache_used_ratio small gpu"] == 0.5
    assert values["paged_cache_used_ratio large gpu"] == 0.0


def test_a_label_may_hold_any_text():
    metrics = Metrics(make_manager(2), labels={"model_name": 'a "b"\\\n'})
    (family, *_) = parse(metrics.text("vllm"))
    assert family.samples[0].labels == {"model_name": 'a "b"\\\n'}


def test_scrapes_while_sequences_come_and_go_break_nothing():
    manager = make_manager(1000)
    metrics = Metrics(manager)
    pages, errors, done = [], [], threading.Event()

    def scrape():
        try:
            while not done.is_set() or len(pages) < 2:
                pages.append(figures(metrics.text()))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=scrape)
    try:
        thread.start()
        live = [admit(manager, k, [k] * 6) for k in range(100)]
        for k in range(100, 4000):
            manager.free(live.pop(0))
            live.append(admit(manager, k, [k % 50] * (1 + k % 12)))
            grow(manager, live[k % len(live)], [1])
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
    totals = [name for name in pages[0] if "_total" in name]
    for before, after in pairwise(pages):
        assert all(before[name] <= after[name] for name in totals)
    for page in pages:
        assert all(0 <= value <= 1 for name, value in page.items() if "_ratio" in name)
    assert figures(metrics.text())["paged_cache_used_ratio gpu"] == manager.stats().gpu.usage > 0


# Reading over HTTP


def test_both_sets_of_names_are_served_until_closed():
    manager = make_manager(4)
    admit(manager, "a", [1, 2])
    metrics = Metrics(manager)
    ports = [metrics.serve(0), metrics.serve(0, names="vllm")]
    for port, names in zip(ports, ("paged", "vllm"), strict=True):
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.read().decode() == metrics.text(names)
    with urlopen(f"http://127.0.0.1:{ports[0]}/metrics?name[]=paged_cache_used_ratio") as answer:
        assert figures(answer.read().decode()) == {
            "paged_cache_used_ratio gpu": 0.25,
            "paged_cache_used_ratio cpu": 0.0,
        }
    with pytest.raises(OSError, match=f"port is {ports[0]}, address '127.0.0.1': .*in use"):
        metrics.serve(ports[0])
    metrics.close()
    for port in ports:
        with pytest.raises(URLError):
            urlopen(f"http://127.0.0.1:{port}/metrics")
    assert metrics.serve(ports[0]) == ports[0]
    metrics.close()


@pytest.mark.parametrize("names", ["paged", "vllm"])
def test_who_asks_for_open_metrics_gets_the_names_with_their_colons(names):
    metrics = Metrics(crowded())
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    request = Request(
        f"http://127.0.0.1:{metrics.serve(0, names=names)}/metrics", headers={"Accept": accepted}
    )
    with urlopen(request) as answer:
        assert answer.read().decode() == metrics.text(names)
    metrics.close()


# promtool


@pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed")
@pytest.mark.parametrize("busy", [False, True], ids=["empty", "busy"])
@pytest.mark.parametrize("form", ["manager", "scheduler", "engine"])
def test_promtool_finds_nothing_to_say(form, busy):
    if form == "engine":
        metrics = Metrics()
        engine = make_engine(metrics)
        if busy:
            generate(engine)
    else:
        scheduler = crowded() if busy else make_scheduler(4)
        source = scheduler if form == "scheduler" else scheduler.manager
        metrics = Metrics(source, labels={"model_name": "tiny"})
    assert promtool(metrics.text()) == ""
    complaints = promtool(metrics.text("vllm")).splitlines()  # the colon is vLLM's choice
    assert complaints
    assert all(line.endswith("metric names should not contain ':'") for line in complaints)


@pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed")
def test_promtool_would_say_something():
    text = Metrics(make_manager(4)).text().replace("_hit_tokens_total", "_hit_tokens")
    assert 'counter metrics should have "_total" suffix' in promtool(text)


# Mistakes


@pytest.mark.parametrize("source", [3, "engine", SimpleNamespace(scheduler=None)])
def test_other_sources_are_refused(source):
    metrics = Metrics()
    with pytest.raises(TypeError, match=r"source is .*; it must be an Engine, Scheduler or"):
        metrics.watch(source)
    metrics.watch(make_manager(2))
    assert metrics.text()


def test_a_second_source_is_refused():
    first, second = make_manager(2), make_manager(4)
    admit(first, "a", [1])
    metrics = Metrics(first)
    with pytest.raises(ValueError, match=r"source is .*; these metrics read another already"):
        metrics.watch(second)
    assert figures(metrics.text())["paged_cache_used_ratio gpu"] == 0.5


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ({"model name": "a"}, ValueError, "labels has 'model name'"),
        ({"__name": "a"}, ValueError, "labels has '__name'"),
        ({"tier": "a"}, ValueError, "labels has 'tier'; .* not kind, le or tier"),
        ({"": "a"}, ValueError, "labels has ''"),
        ({7: "a"}, ValueError, "labels has 7"),
        ({"model": 7}, TypeError, r"labels\['model'\] is 7; it must be a str"),
    ],
    ids=["space", "underscores", "taken", "empty", "number", "value"],
)
def test_labels_are_checked(labels, error, message):
    with pytest.raises(error, match=message):
        Metrics(labels=labels)


def test_arguments_of_serve_are_checked():
    metrics = Metrics(make_manager(2))
    with pytest.raises(TypeError, match="port is '80'"):
        metrics.serve("80")
    with pytest.raises(ValueError, match="port is 65536; it must be at most 65535"):
        metrics.serve(65536)
    with pytest.raises(ValueError, match="names is 'sglang'; it must be 'paged' or 'vllm'"):
        metrics.serve(0, names="sglang")
    metrics.close()


def test_without_prometheus_client_the_error_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'paged\[metrics\]'"):
        Metrics()


def test_importing_metrics_loads_no_prometheus_client():
    code = "import sys, paged.metrics\nassert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
