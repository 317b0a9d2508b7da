"""The tests that ``make long`` runs after ``make test``, which has shorter ones of the same rules; a pytest plugin.

Three kinds are long: the modules of a table, each beside one that stays for its rules; tests on PostgreSQL, as the
same ones stay on SQLite, unless they are those of the store; and most variants of a test that has many.

Client suites run without penstock, so nothing of penstock is imported here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

MANY = 16
"""The number of variants from which on ``make test`` has only every `STEP`-th of a test."""

STEP = 4

OF_STORES = "tests/unit/services/store"

STAYING = {
    "tests/bench/fuzz": "tests/flow/api/test_openapi_fuzz.py",
    "tests/bench/load": "tests/bench/test_paced.py",
    "tests/bench/mutants": "tests/bench/test_bare.py",
    "tests/bench/soak": "tests/flow/api/test_retention.py",
    "tests/bench/test_bench.py": "tests/bench/test_bare.py",
    "tests/bench/test_rollouts.py": "tests/flow/rollouts/test_command.py",
    "tests/flow/api/test_collector.py": "tests/unit/api/runs/test_heap.py",
    "tests/flow/api/test_connections.py": "tests/flow/api/test_limits.py",
    "tests/flow/api/test_garbage.py": "tests/unit/api/runs/test_heap.py",
    "tests/flow/api/test_killed_ingestion.py": "tests/flow/api/test_vector_stores.py",
    "tests/flow/api/test_large_requests.py": "tests/flow/api/test_long_bodies.py",
    "tests/flow/api/test_outages.py": "tests/unit/services/store/test_writer.py",
    "tests/flow/api/test_search_attacks.py": "tests/flow/api/test_file_search.py",
    "tests/flow/api/test_secret_settings.py": "tests/flow/api/test_secrets.py",
    "tests/flow/api/test_socket_drills.py": "tests/flow/api/test_sockets.py",
    "tests/flow/api/test_unreadable_parts.py": "tests/flow/api/test_content_parts.py",
    "tests/flow/api/test_wrong_bytes.py": "tests/flow/api/test_openapi_fuzz.py",
    "tests/flow/batches/test_killed_batches.py": "tests/unit/extensions/batches/test_runner.py",
    "tests/flow/lifecycle/test_backup.py": "tests/unit/services/store/test_sqlite.py",
    "tests/flow/lifecycle/test_frontends.py": "tests/flow/api/test_peers.py",
    "tests/flow/lifecycle/test_killed_containers.py": "tests/unit/extensions/tools/sandbox/test_stored_containers.py",
    "tests/flow/lifecycle/test_killed_programs.py": "tests/flow/api/test_programs.py",
    "tests/flow/lifecycle/test_killed_uploads.py": "tests/flow/api/test_files_api.py",
    "tests/flow/lifecycle/test_models_of_servers.py": "tests/flow/api/test_foreign_queues.py",
    "tests/flow/lifecycle/test_signals.py": "tests/flow/api/test_stopping.py",
    "tests/flow/lifecycle/test_upgrades.py": "tests/unit/services/store/test_migrations.py",
    "tests/flow/lifecycle/test_walk.py": "tests/flow/lifecycle/test_matrix.py",
    "tests/flow/test_core_alone.py": "tests/unit/test_layout.py",
    "tests/flow/test_start_page.py": "tests/unit/api/cli/test_commands_of_pages.py",
    "tests/flow/test_wheel.py": "tests/flow/test_promises.py",
    "tests/live/agents": "tests/live/opencode/test_opencode.py",
    "tests/live/claude/test_rollouts.py": "tests/flow/rollouts/test_prove.py",
    "tests/live/clients/test_litellm_proxy.py": "tests/live/clients/test_litellm.py",
    "tests/live/codex/test_rollouts.py": "tests/flow/rollouts/test_prove.py",
    "tests/live/engine/test_compare.py": "tests/unit/extensions/workbench/test_shadow.py",
    "tests/live/engine/test_conformance.py": "tests/unit/extensions/workbench/conformance/test_checks.py",
    "tests/live/engine/test_data_parallel.py": "tests/live/engine/test_http_engine.py",
    "tests/live/engine/test_frontends.py": "tests/live/engine/test_surviving.py",
    "tests/live/engine/test_kv_events.py": "tests/unit/services/engines/test_kv_events.py",
    "tests/live/engine/test_recorded_vllm.py": "tests/flow/api/test_wiretap.py",
    "tests/live/engine/test_several_models.py": "tests/flow/several/test_commands.py",
    "tests/live/engine/test_usage_reports.py": "tests/unit/services/engines/test_workers.py",
    "tests/live/engine/test_weights.py": "tests/flow/api/test_weights.py",
    "tests/simulation": "tests/flow/lifecycle/test_matrix.py",
    "tests/typing": "tests/unit/pipeline/test_core.py",
    "tests/unit/extensions/tools/browser/test_html.py": "tests/unit/extensions/tools/browser/test_reader.py",
    "tests/unit/extensions/tools/browser/test_session.py": "tests/unit/extensions/tools/browser/test_pages.py",
    "tests/unit/extensions/tools/files/test_file_reader.py": "tests/flow/api/test_files.py",
    "tests/unit/extensions/tools/mcp/test_losses.py": "tests/unit/extensions/tools/mcp/test_calls.py",
    "tests/unit/extensions/tools/sandbox/test_attacks.py": "tests/unit/extensions/tools/sandbox/test_folder.py",
    "tests/unit/extensions/tools/sandbox/test_container.py": "tests/flow/api/test_containers.py",
    "tests/unit/extensions/tools/sandbox/test_live_containers.py": "tests/flow/api/test_containers.py",
    "tests/unit/extensions/tools/sandbox/test_probe.py": "tests/unit/extensions/tools/sandbox/test_start.py",
    "tests/unit/extensions/tools/sandbox/test_python.py": "tests/unit/extensions/tools/sandbox/test_described.py",
    "tests/unit/extensions/workbench/conformance/test_command.py": (
        "tests/unit/extensions/workbench/conformance/test_checks.py"
    ),
    "tests/unit/extensions/workbench/test_shrink.py": "tests/unit/pipeline/recordings/test_ddmin.py",
    "tests/unit/testing/test_parsers.py": "tests/unit/stages/models/chat/test_families.py",
}
"""The tests that stay in ``make test`` for the rules of a long module or folder, by its path."""


@pytest.hookimpl(tryfirst=True)  # pytest's own hook then leaves out what ``-m`` does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long."""
    long = long_tests([item.nodeid for item in items])
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.long)


def long_tests(ids: Iterable[str]) -> set[str]:
    """Return those of the tests that are long, by pytest's ids."""
    variants, long = defaultdict[str, list[str]](list), set[str]()
    for each in ids:
        name, _, variant = each.partition("[")
        path = PurePosixPath(name.partition("::")[0])
        of_postgres = "postgres" in variant and not path.is_relative_to(OF_STORES)
        if of_postgres or any(place.as_posix() in STAYING for place in (path, *path.parents)):
            long.add(each)
        else:
            variants[name].append(each)
    for several in variants.values():
        if len(several) >= MANY:
            long.update(several)
            long.difference_update(several[::STEP])
    return long
