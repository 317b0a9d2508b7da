from __future__ import annotations

from tests.support.charts import HELM

collect_ignore = [] if HELM.exists() else ["test_chart.py"]
