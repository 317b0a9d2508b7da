"""The tests that ``make long`` runs after ``make test``, which has shorter ones of the same rules; a pytest plugin.

Client suites run without penstock, so nothing of penstock is imported here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAYING = {
    "tests/bench/fuzz": "tests/flow/api/test_openapi_fuzz.py",
    "tests/bench/load": "tests/bench/test_paced.py",
    "tests/bench/mutants": "tests/bench/test_bare.py",
    "tests/bench/soak": "tests/flow/api/test_retention.py",
    "tests/bench/test_bench.py": "tests/bench/test_bare.py",
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
    "tests/flow/lifecycle/test_backup.py": "tests/unit/services/store/test_sqlite.py",
    "tests/flow/lifecycle/test_frontends.py": "tests/flow/api/test_peers.py",
    "tests/flow/lifecycle/test_killed_containers.py": "tests/unit/extensions/tools/sandbox/test_stored_containers.py",
    "tests/flow/lifecycle/test_killed_uploads.py": "tests/flow/api/test_files_api.py",
    "tests/flow/lifecycle/test_models_of_servers.py": "tests/flow/api/test_foreign_queues.py",
    "tests/flow/lifecycle/test_signals.py": "tests/flow/api/test_stopping.py",
    "tests/flow/lifecycle/test_upgrades.py": "tests/unit/services/store/test_migrations.py",
    "tests/flow/lifecycle/test_walk.py": "tests/flow/lifecycle/test_matrix.py",
    "tests/flow/test_core_alone.py": "tests/unit/test_layout.py",
    "tests/flow/test_wheel.py": "tests/flow/test_promises.py",
    "tests/live/agents": "tests/live/opencode/test_opencode.py",
    "tests/live/clients/test_litellm_proxy.py": "tests/live/clients/test_litellm.py",
    "tests/live/engine/test_compare.py": "tests/unit/extensions/workbench/test_shadow.py",
    "tests/live/engine/test_conformance.py": "tests/unit/extensions/workbench/conformance/test_checks.py",
    "tests/live/engine/test_data_parallel.py": "tests/live/engine/test_http_engine.py",
    "tests/live/engine/test_frontends.py": "tests/live/engine/test_surviving.py",
    "tests/live/engine/test_kv_events.py": "tests/unit/services/engines/test_kv_events.py",
    "tests/live/engine/test_recorded_vllm.py": "tests/flow/api/test_wiretap.py",
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
    "tests/unit/extensions/workbench/test_shrink.py": "tests/unit/pipeline/recordings/test_ddmin.py",
    "tests/unit/testing/test_parsers.py": "tests/unit/stages/models/chat/test_families.py",
}
"""The tests that stay in ``make test`` for the rules of a long module or folder, by its path."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is long."""
    path = item.path.relative_to(ROOT)
    if any(place.as_posix() in STAYING for place in (path, *path.parents)):
        item.add_marker(pytest.mark.long)
