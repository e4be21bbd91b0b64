import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Locust patches the standard library where it is imported: a process of its own.
PROGRAM = """
import json
from loadtests.generator.locust_statistics import refine
refine()
refine()
from locust.stats import RequestStats, StatsCSV, get_stats_summary, get_percentile_stats_summary
stats = RequestStats()
for ms in (0.1234, 0.1278, 0.6, 1.4, 123.456):
    stats.log_request("POST", "/predict", ms, 100)
stats.log_request("QUEUE", "/predict", 0.04, 0)
stats.log_request("COMPUTE", "/predict", 0.05, 0)
stats.log_error("POST", "/predict", "a fault")
post = stats.entries["/predict", "POST"]
class Environment:
    pass
environment = Environment()
environment.stats = stats
csv = StatsCSV(environment, [0.5, 1.0])
print(json.dumps({
    "kept": post.response_times,
    "rows": sorted(kind for _, kind in stats.entries),
    "total": [stats.total.num_requests, stats.total.total_content_length, stats.total.fail_ratio],
    "shown": post.to_dict(),
    "csv": csv._percentile_fields(post),
    "summary": get_stats_summary(stats, current=False),
    "percentiles": get_percentile_stats_summary(stats),
}))
"""


@pytest.fixture(scope="module")
def refined() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_times_are_kept_at_10_microseconds_whatever_their_size(refined: Any) -> None:
    assert {float(key): count for key, count in refined["kept"].items()} == {
        0.12: 1,
        0.13: 1,
        0.6: 1,
        1.4: 1,
        123.46: 1,
    }


def test_the_server_s_own_times_have_rows_and_no_part_in_the_aggregate(refined: Any) -> None:
    assert refined["rows"] == ["COMPUTE", "POST", "QUEUE"]
    assert refined["total"] == [5, 500, 0.2]


def test_the_web_page_and_the_csv_file_show_them_unrounded(refined: Any) -> None:
    shown = refined["shown"]
    assert (shown["min_response_time"], shown["median_response_time"], shown["max_response_time"]) == (
        0.12,
        0.6,
        123.46,
    )
    assert refined["csv"] == [0.6, 123.46]


def test_the_console_s_lines_show_them_unrounded_under_locust_s_headings(refined: Any) -> None:
    (line,) = [line for line in refined["summary"] if line.startswith("POST")]
    assert line.split("|")[1].split() == ["25.14", "0.12", "123.46", "0.60"]
    assert line.rindex("|") == refined["summary"][0].rindex("|")
    (line,) = [line for line in refined["percentiles"] if line.startswith("POST")]
    assert line.split()[2] == "0.60"
    assert line.split()[-1] == "5"
